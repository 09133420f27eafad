"""POST /v1/messages by Anthropic's official client, unchanged, and what the wire has beneath it."""

import json
import re
from collections.abc import AsyncIterator

import anthropic
import httpx
import httpx2
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.server.app import create_app
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.recorded_calls import HERMES_NOW, HERMES_PARIS

ASK = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
BODY = {"model": "tiny", "max_tokens": 64, "messages": ASK}


@pytest.fixture
async def client(rig, model_folder) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Over a model with tools that thinks."""
    rig.tokenizer = Tokenizer.load(model_folder, "chatml-tools")
    rig.backend.max_model_len = 4000
    rig.policy = PolicyConfig()
    names = ParserNames(reasoning="qwen3")
    rig.app = create_app(rig.backend, rig.tokenizer, rig.metrics, lambda: rig.policy, parsers=names)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(rig.app), trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url="http://test", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def ask(client: anthropic.AsyncAnthropic, **fields):
    return client.messages.create(**BODY | fields)


def streaming(client: anthropic.AsyncAnthropic, **fields):
    return client.messages.stream(**BODY | fields)


def said(*blocks: dict, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": [*blocks]}]}


def deep(depth: int) -> dict:
    """A schema of nested objects."""
    schema: dict = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def events_of(text: str) -> list[tuple[str, dict]]:
    """Names and bodies of a stream."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        events.append((body["type"], body))
    return events


async def test_an_answer_is_a_message_of_text(rig, client):
    reply = await ask(client, system="Be brief")

    assert [block.model_dump(exclude_none=True) for block in reply.content] == [
        {"type": "text", "text": "Hello, world!"}
    ]
    assert reply.role == "assistant"
    assert reply.type == "message"
    assert reply.model == "tiny"
    assert reply.stop_reason == "end_turn"
    assert reply.stop_sequence is None
    spec = rig.backend.calls[0][0][0]
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(spec.prompt)
    assert reply.usage.cache_read_input_tokens == 16
    assert reply.usage.cache_creation_input_tokens == 0
    assert reply.usage.output_tokens == 14
    assert reply._request_id
    assert reply.id == f"msg_{reply._request_id}"
    assert spec.sampling.max_tokens == 64
    assert "system\nBe brief<|im_end|>" in rig.prompt()


async def test_sampling_and_stop_sequences_reach_the_engine(rig, client):
    reply = await ask(
        client,
        max_tokens=9,
        stop_sequences=["nothing", ", w"],
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7},
    )
    sampling = rig.backend.calls[0][0][0].sampling

    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.25
    assert sampling.top_k == 7
    assert sampling.max_tokens == 9
    assert reply.content[0].text == "Hello"
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == ", w"
    cut = await ask(client, max_tokens=2)
    assert (cut.content[0].text, cut.stop_reason) == ("He", "max_tokens")


async def test_a_stream_has_anthropics_events_in_their_order(rig, client):
    rig.say("Hi!")
    async with streaming(client) as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_message()

    raw = [name for name in names if name not in ("text", "ping")]
    assert raw == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert final.content[0].text == "Hi!"
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 4
    assert final.usage.cache_read_input_tokens == 16


async def test_calls_of_tools_are_blocks(rig, client):
    rig.say(f"Let me look.\n{HERMES_PARIS}\n{HERMES_NOW}")
    reply = await ask(client, max_tokens=500, tools=[WEATHER, NOW])

    assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in reply.content[1:]] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert reply.stop_reason == "tool_use"
    assert '"get_weather"' in rig.prompt()
    async with streaming(client, max_tokens=500, tools=[WEATHER, NOW]) as stream:
        final = await stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in reply.content
    ]


async def test_results_of_tools_go_back_to_the_model(rig, client):
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "They want the weather.", "signature": "x"},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Paris"},
                },
                {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": "no clock",
                    "is_error": True,
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    await ask(client, messages=history, tools=[WEATHER, NOW])
    shown = rig.prompt()

    assert (
        shown.index("Let me look.")
        < shown.index('"Paris"')
        < shown.index("sunny")
        < shown.index("Error: no clock")
        < shown.index("So?")
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({"type": "any"}, ["get_weather", "now"]), ({"type": "tool", "name": "now"}, ["now"])],
)
async def test_forced_calls_are_constrained_and_end_by_tool_use(rig, client, choice, expected):
    rig.say("{}" if choice["type"] == "tool" else '[{"name": "now", "parameters": {}}]')
    reply = await ask(client, tools=[WEATHER, NOW], tool_choice=choice)

    assert [(block.type, block.name, block.input) for block in reply.content] == [
        ("tool_use", "now", {})
    ]
    assert reply.stop_reason == "tool_use"
    constraint = rig.spec.sampling.constraint
    assert constraint is not None
    assert choice["type"] == "tool" or all(name in constraint.text for name in expected)


@pytest.mark.parametrize("written", ['{"x": "\\ud800"}', '{"x": ' + "[" * 1500 + "]" * 1500 + "}"])
async def test_a_call_whose_input_json_cannot_carry_is_empty(rig, client, http, written):
    rig.say(written)
    choice = {"type": "tool", "name": "now"}
    reply = await http.post(
        "/v1/messages", json={**BODY, "max_tokens": 3500, "tools": [NOW], "tool_choice": choice}
    )

    assert reply.status_code == 200
    assert reply.json()["content"][0]["input"] == {}


async def test_no_tool_is_shown_with_choice_none(rig, client):
    await ask(client, tools=[WEATHER], tool_choice={"type": "none"})

    assert "get_weather" not in rig.prompt()


async def test_hints_for_other_models_change_nothing(rig, http):
    """As coding agents send them to any model: this one is not known to think."""
    rig.policy = PolicyConfig()
    hints = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "metadata": {"user_id": "x"},
        "output_config": {"effort": "high"},
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    }
    rig.backend.max_model_len = 4000
    reply = await http.post("/v1/messages?beta=true", json=BODY | {"max_tokens": 2000} | hints)

    assert reply.status_code == 200
    assert reply.json()["content"] == [{"type": "text", "text": "Hello, world!"}]
    assert rig.backend.calls[0][0][0].sampling.constraint is None


async def test_a_schema_constrains_the_answer(rig, client):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    rig.say('{"x": 1}')
    body = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    await ask(client, extra_body=body)

    assert '"integer"' in rig.spec.sampling.constraint.text


async def test_tokens_are_counted_as_the_model_sees_them(rig, client):
    counted = await client.messages.count_tokens(
        model="tiny", messages=ASK, system="Be brief", tools=[NOW]
    )
    await ask(client, max_tokens=8, system="Be brief", tools=[NOW])

    assert counted.input_tokens == len(rig.backend.calls[0][0][0].prompt)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: must be a valid integer"),
        ({"messages": []}, "messages: "),
        (said({"type": "image", "source": {}}), "messages[0].content[0]: has type 'image'"),
        (said({"type": "text"}), "messages[0].content[0].text: is required"),
        (said(TOOL_USE), "belongs to role assistant"),
        (said(RESULT, role="assistant"), "belongs to role user"),
        (said(RESULT), "messages: no earlier message has a call 'a'"),
        ({"tools": [NOW, NOW]}, "tools[1].name: 'now' names an earlier tool"),
        (
            {"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}},
            "tool_choice.name: no tool is named 'then'",
        ),
        ({"tools": [{"name": "now", "input_schema": deep(80)}]}, "tools[0].input_schema: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": deep(80)}}},
            "output_config.format: objects and lists are nested",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"system": 3}, "system: "),
        (
            said(RESULT | {"content": 3}),
            "messages[0].content[0].content: must be a valid string or a valid list",
        ),
        (
            said(RESULT | {"content": [{"type": "x"}]}),
            "messages[0].content[0].content[0].type: must be 'text'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type: is not supported here",
        ),
        (
            {"tools": [{"name": "now", "input_schema": {"description": "\ud800"}}]},
            "tools[0].input_schema: ",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": [NOW]}, "tool_choice.name: is required"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is required"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens: must be less than max_tokens=64",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: is not supported here"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
async def test_bad_input_is_refused_in_anthropics_shape(rig, client, http, fields, words):
    reply = await http.post(
        "/v1/messages",
        content=json.dumps(BODY | fields),
        headers={"content-type": "application/json"},
    )
    body = reply.json()

    assert reply.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]
    assert body["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [
        (1, r"^prompt is too long: (\d+) tokens > (\d+) maximum$"),
        (
            4000,
            r"^input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), "
            "decrease input length or `max_tokens` and try again$",
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_conversation_beyond_the_context_is_refused_in_anthropics_words(
    rig, http, max_tokens, words, stream
):
    is_long = max_tokens == 1
    content = "x" * 5000 if is_long else "Hi"
    messages = {"messages": [{"role": "user", "content": content}], "stream": stream}
    rig.backend.max_model_len = 4000
    reply = await http.post("/v1/messages", json=BODY | messages | {"max_tokens": max_tokens})
    error = reply.json()["error"]
    found = re.search(words, error["message"])

    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert found is not None
    counts = [int(count) for count in found.groups()]
    assert counts[-1] == (3999 if is_long else 4000)
    assert sum(counts[:-1]) > counts[-1]


async def test_calls_have_anthropics_ids_whole_and_streamed(rig, client):
    rig.say(HERMES_NOW)
    fields = {"model": "tiny", "max_tokens": 500, "messages": ASK, "tools": [NOW]}
    reply = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()

    for message in (reply, streamed):
        assert re.fullmatch("toolu_[0-9a-f]{24}", message.content[0].id)
        assert message.id.startswith("msg_")


async def test_a_mistral_models_ids_come_back_as_it_wrote_them(rig):
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length "
        "!= 9 %}{{ raise_exception('id') }}{% endif %}{{ call.id }}{% endfor %}{{ "
        "m.tool_call_id or '' }}{{ m.content }}{% endfor %}{{ tools }}[TOOL_CALLS]"
    )
    rig.tokenizer.chat_template = ChatTemplate(template, {})
    rig.backend.max_model_len = 4000
    rig.say('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    app = rig.make_app(parsers=ParserNames(tools="mistral"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        first = await http.post("/v1/messages", json=BODY | {"tools": [NOW], "max_tokens": 500})
        (call,) = first.json()["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "noon"}
        messages = [
            *ASK,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        body = BODY | {"tools": [NOW], "messages": messages}
        second = await http.post("/v1/messages", json=body)

    assert re.fullmatch("toolu_[A-Za-z0-9]{9}", call["id"])
    assert second.status_code == 200, second.text
    assert rig.prompt().count(call["id"].removeprefix("toolu_")) == 2


@pytest.mark.parametrize(
    "content",
    [
        "The answer is (",
        [{"type": "text", "text": "The answer"}, {"type": "text", "text": " is ("}],
    ],
)
async def test_a_final_message_of_the_assistant_is_continued(rig, client, content):
    begun = [*ASK, {"role": "assistant", "content": content}]
    reply = await ask(client, messages=begun)
    counted = await client.messages.count_tokens(model="tiny", messages=begun)

    assert reply.content[0].text == "Hello, world!", "the beginning is not repeated"
    assert rig.prompt().endswith("<|im_start|>assistant\nThe answer is (")
    assert counted.input_tokens == len(rig.spec.prompt)
    async with streaming(client, messages=begun) as stream:
        final = await stream.get_final_message()
    assert final.content[0].text == "Hello, world!"


async def test_a_template_that_cannot_continue_a_message_is_an_error_of_the_messages(rig, http):
    rig.tokenizer.chat_template = ChatTemplate("{{ messages[0].content }}", {})
    begun = [*ASK, {"role": "assistant", "content": "So"}]
    reply = await http.post("/v1/messages", json=BODY | {"messages": begun})

    assert reply.json()["error"]["message"].startswith("messages: the model's chat template chang")


@pytest.mark.parametrize("content", ["", []])
async def test_an_empty_final_message_of_the_assistant_begins_nothing(rig, http, content):
    messages = [*ASK, {"role": "assistant", "content": content}]
    assert (await http.post("/v1/messages", json=BODY)).status_code == 200
    reply = await http.post("/v1/messages", json=BODY | {"messages": messages})

    assert reply.status_code == 200
    assert rig.backend.calls[0][0][0].prompt == rig.backend.calls[1][0][0].prompt
    alone = await http.post("/v1/messages", json=BODY | {"messages": messages[1:]})
    assert alone.status_code == 200


SCHEMA = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ("So ", {}, "messages[1].content: final assistant content cannot end with trailing white"),
        ([{"type": "text", "text": "So\n"}], {}, "cannot end with trailing whitespace"),
        (" ", {}, "cannot end with trailing whitespace"),
        (
            [{"type": "tool_use", "id": "a", "name": "now", "input": {}}],
            {"tools": [NOW]},
            "messages[1].content: tool_use blocks need tool_result blocks after them",
        ),
        (
            [{"type": "thinking", "thinking": "Hm", "signature": ""}],
            {},
            "messages[1].content: the final block in an assistant message cannot be thinking",
        ),
        ("{", SCHEMA, "messages[1].content: an answer that is begun cannot be held to output_con"),
    ],
)
async def test_a_final_message_that_no_answer_goes_on_from_is_refused(
    rig, client, http, path, content, fields, words
):
    messages = [*ASK, {"role": "assistant", "content": content}]
    reply = await http.post(path, json=BODY | {"messages": messages} | fields)

    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in reply.json()["error"]["message"]


async def test_a_schema_that_the_engine_refuses_is_named_as_this_api_names_it(rig, http):
    rig.backend.error = RequestError("cannot be compiled", param=CONSTRAINT_PARAM)
    sampling_request = {
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    }
    reply = await http.post("/v1/messages", json=BODY | sampling_request)

    assert reply.json()["error"]["message"] == "output_config.format: cannot be compiled"


async def test_every_door_answers_in_anthropics_shape(rig):
    rig.policy = PolicyConfig()
    app = rig.make_app(tenant_of=lambda key: "team" if key == "good" else None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        found = []
        for headers, body in (
            ({}, BODY),
            ({"x-api-key": "bad"}, BODY),
            ({"x-api-key": "good"}, BODY | {"model": "other"}),
        ):
            reply = await http.post("/v1/messages", json=body, headers=headers)
            found.append((reply.status_code, reply.json()["error"]["type"]))
        good = {"x-api-key": "good", "anthropic-version": "2023-06-01"}
        assert (await http.post("/v1/messages", json=BODY, headers=good)).status_code == 200
        assert (
            await http.post("/v1/messages", json=BODY, headers={"authorization": "Bearer good"})
        ).status_code == 200
        missing = await http.get("/v1/messages/none", headers=good)
        rig.backend.not_ready = "it loads"
        busy = await http.post("/v1/messages", json=BODY, headers=good)
    assert found == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
    ]
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert busy.status_code == 503
    assert busy.json()["error"]["type"] == "overloaded_error"
    assert busy.headers["retry-after"] == "1"
    assert rig.backend.calls[0][0][0].cache_salt


async def test_a_failure_after_the_first_token_is_an_error_event(rig, http):
    rig.backend.error, rig.backend.error_after = RuntimeError("broken"), 2
    events = events_of((await http.post("/v1/messages", json={**BODY, "stream": True})).text)

    assert events[-1][1]["error"]["type"] == "api_error"
    assert "message_stop" not in [name for name, _ in events]
