"""POST /v1/responses by OpenAI's official client, unchanged: whole, streamed, with tools, and going
on from what is kept.
"""

import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import openai
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.server.app import create_app
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.responses.formatter import shown_items
from pdcluster_worker.server.responses.route import Kept, ResponseStore, bytes_of
from pdcluster_worker.server.responses.schemas import ResponsesRequest
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.recorded_calls import HERMES_NOW, HERMES_PARIS

BODY = {"model": "tiny", "input": "Hi"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": None}


@pytest.fixture
async def client(rig, model_folder) -> AsyncIterator[openai.AsyncOpenAI]:
    """Over a model with tools that thinks."""
    rig.tokenizer = Tokenizer.load(model_folder, "chatml-tools")
    rig.backend.max_model_len = 4000
    rig.policy = PolicyConfig()
    rig.app = create_app(
        rig.backend,
        rig.tokenizer,
        rig.metrics,
        lambda: rig.policy,
        parsers=ParserNames(reasoning="qwen3"),
    )
    http = httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), trust_env=False)
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def ask(client: openai.AsyncOpenAI, **fields):
    return client.responses.create(**BODY | fields)


async def streamed(client, **fields) -> list:
    """All events of a stream, numbered without a gap."""
    stream = await ask(client, stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_a_response_has_openais_shape(rig, client):
    reply = await ask(
        client,
        instructions="Be brief",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.25,
        metadata={"a": "b"},
    )
    spec = rig.backend.calls[0][0][0]

    assert reply.output_text == "Hello, world!"
    assert reply.status == "completed"
    assert reply.object == "response"
    assert reply.model == "tiny"
    assert reply.error is None
    assert reply.incomplete_details is None
    (item,) = reply.output
    assert item.type == "message"
    assert item.role == "assistant"
    assert item.status == "completed"
    assert item.content[0].type == "output_text"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(spec.prompt), 14)
    assert reply.usage.input_tokens_details.cached_tokens == 16
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
    assert reply.metadata == {"a": "b"}
    assert reply.temperature == 0.5
    assert reply.top_p == 0.25
    assert reply.instructions == "Be brief"
    assert spec.sampling.max_tokens == 50
    assert spec.sampling.temperature == 0.5
    assert spec.sampling.top_p == 0.25
    assert "system\nBe brief<|im_end|>" in rig.prompt()


async def test_a_stream_has_the_typed_events_in_their_order(rig, client):
    rig.say("Hi!")
    events = await streamed(client)

    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[0].response.usage is None
    assert events[2].item.content == []
    assert events[3].part.text == ""
    assert events[7].text == events[8].part.text == events[9].item.content[0].text == "Hi!"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[2].item.id}
    assert events[-1].response.output_text == "Hi!"
    assert events[-1].response.usage.output_tokens == 4


async def test_the_official_streaming_helper_takes_the_events(rig, client):
    async with client.responses.stream(model="tiny", input="Hi") as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        final = await stream.get_final_response()

    assert text == final.output_text == "Hello, world!"


async def test_calls_are_items_whole_and_streamed(rig, client):
    rig.say(f"Let me look.\n{HERMES_PARIS}\n{HERMES_NOW}")
    reply = await ask(client, tools=[WEATHER, NOW])
    calls = reply.output[1:]

    assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert len({call.call_id for call in calls}) == 2
    events = await streamed(client, tools=[WEATHER, NOW])
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments, event.output_index) for event in done] == [
        (call.name, call.arguments, place) for place, call in enumerate(calls, start=1)
    ]
    deltas = [
        event
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.output_index == 1
    ]
    assert "".join(event.delta for event in deltas) == calls[0].arguments
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.type, getattr(item, "arguments", "")) for item in added] == [
        ("message", ""),
        ("function_call", ""),
        ("function_call", ""),
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
async def test_a_forced_call_is_constrained(rig, client, choice):
    rig.say("{}" if isinstance(choice, dict) else '[{"name": "now", "parameters": {}}]')
    reply = await ask(client, tools=[NOW], tool_choice=choice, parallel_tool_calls=False)

    assert [(item.type, item.name) for item in reply.output] == [("function_call", "now")]
    assert rig.spec.sampling.constraint is not None
    assert reply.tool_choice == choice or reply.tool_choice.name == "now"


async def test_items_of_a_conversation_reach_the_model_in_their_order(rig, client):
    items = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_weather",
            "arguments": '{"city": "Paris"}',
        },
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "noon"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Fine.", "annotations": []}],
        },
        {"role": "user", "content": "So?"},
    ]
    await ask(client, input=items, tools=[WEATHER, NOW])
    shown = rig.prompt()

    places = [
        shown.index(text)
        for text in ("Be brief", "Weather?", '"Paris"', "sunny", "noon", "Fine.", "So?")
    ]
    assert places == sorted(places)


async def test_a_text_format_constrains_the_answer(rig, client):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    rig.say('{"x": 1}')
    reply = await ask(
        client,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    )

    assert '"integer"' in rig.spec.sampling.constraint.text
    assert reply.text.format.schema_ == schema


async def test_a_response_goes_on_from_one_that_is_kept(rig, client):
    first = await ask(client, input="First?", instructions="Be brief")
    second = await ask(client, input="Second?", previous_response_id=first.id)
    shown = rig.prompt()

    assert shown.index("First?") < shown.index("Hello, world!") < shown.index("Second?")
    assert "Be brief" not in shown  # instructions do not carry over
    assert second.previous_response_id == first.id
    await client.responses.delete(first.id)
    await ask(client, input="Third?", previous_response_id=second.id)
    assert rig.prompt().index("First?") < rig.prompt().index("Third?")


async def test_calls_go_on_from_a_kept_response(rig, client):
    rig.say(HERMES_NOW)
    first = await ask(client, input="Time?", tools=[NOW])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "noon"}
    rig.say("Noon.")
    second = await ask(client, input=[output], tools=[NOW], previous_response_id=first.id)

    assert second.output_text == "Noon."
    assert rig.prompt().index("Time?") < rig.prompt().index("noon")


async def test_a_kept_response_is_read_listed_and_deleted(rig, client):
    made = await ask(client)
    found = await client.responses.retrieve(made.id)
    items = await client.responses.input_items.list(made.id)

    assert found == made
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", "Hi")]
    await client.responses.delete(made.id)
    for call in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.cancel,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError, match="not kept here"):
            await call(made.id)


async def test_a_streamed_response_is_kept_and_one_not_to_be_stored_is_not(rig, client):
    events = await streamed(client)
    assert (await client.responses.retrieve(events[-1].response.id)).output_text == "Hello, world!"
    unkept = await ask(client, store=False)
    assert unkept.store is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id: response"):
        await ask(client, input="Go on", previous_response_id=unkept.id)
    with pytest.raises(openai.BadRequestError, match="close the connection"):
        await client.responses.cancel(events[-1].response.id)


async def test_a_response_of_another_worker_is_refused_by_name(rig, client):
    other = ResponseStore().new_id("0" * 32)
    with pytest.raises(openai.BadRequestError, match="made by another worker") as caught:
        await ask(client, previous_response_id=other)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


async def test_responses_belong_to_their_keys(rig):
    app = rig.make_app(tenant_of=lambda key: key if key in ("alice", "bob") else None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        made = (await http.post("/v1/responses", json=BODY, headers=alice)).json()
        assert (await http.get(f"/v1/responses/{made['id']}", headers=alice)).status_code == 200
        assert (await http.get(f"/v1/responses/{made['id']}", headers=bob)).status_code == 404
        assert (await http.delete(f"/v1/responses/{made['id']}", headers=bob)).status_code == 404
        assert (await http.get(f"/v1/responses/{made['id']}")).status_code == 401


async def test_a_long_conversation_is_cut_only_on_request(rig, client):
    rig.backend.max_model_len = 600
    turns = [{"role": "user", "content": f"turn {number} {'x' * 60}"} for number in range(20)]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await ask(client, input=turns, max_output_tokens=20)
    assert caught.value.code == "context_length_exceeded"
    await ask(
        client, input=turns, max_output_tokens=20, truncation="auto", instructions="Keep this"
    )

    assert "Keep this" in rig.prompt()
    assert "turn 19 " in rig.prompt()
    assert "turn 0 " not in rig.prompt()
    assert 580 - 100 < len(rig.spec.prompt) <= 580
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await ask(client, input="x" * 700, max_output_tokens=20, truncation="auto")


async def test_a_conversation_goes_on_after_a_call_that_was_cut_off(rig, client):
    rig.say('{"city": "Paris"}')
    named = {"type": "function", "name": "get_weather"}
    reply = await ask(client, tools=[WEATHER], tool_choice=named, max_output_tokens=6)
    output = {
        "type": "function_call_output",
        "call_id": reply.output[0].call_id,
        "output": "no such city",
    }
    await ask(client, input=[output], previous_response_id=reply.id)

    assert reply.output[0].arguments == '{"city'
    assert rig.prompt().index(r'"arguments": "{\"city"') < rig.prompt().index("no such city")


async def test_truncation_drops_outputs_with_their_calls(rig, client):
    calls = [
        {"type": "function_call", "call_id": f"c{number}", "name": "now", "arguments": "{}"}
        for number in (1, 2)
    ]
    outputs = [
        {
            "type": "function_call_output",
            "call_id": f"c{number}",
            "output": f"output {number} " + "y" * 40,
        }
        for number in (1, 2)
    ]
    items = [
        {"role": "user", "content": "Ask"},
        *calls,
        *outputs,
        {"role": "user", "content": "And now"},
    ]
    for length in range(120, 420, 20):
        rig.backend.max_model_len = length
        await ask(client, input=items, max_output_tokens=4, truncation="auto")
        shown = rig.prompt()
        assert "And now" in shown
        assert shown.count("<tool_response>") <= shown.count("<tool_call>")
        assert ("output 1" in shown) <= ("output 2" in shown)
    assert "output 1" in shown


async def test_log_probabilities_of_text_that_waits_are_kept(rig, client):
    include = ["message.output_text.logprobs"]
    rig.say("é  ", end=False)
    fields = {"input": "Hi", "include": include, "tools": [WEATHER], "max_output_tokens": 4}
    reply = await ask(client, **fields)
    events = await streamed(client, **fields)
    expected = ["bytes:\\xc3", "bytes:\\xa9", " ", " "]

    assert reply.output_text == "é  "
    assert [entry.token for entry in reply.output[0].content[0].logprobs] == expected
    assert [
        entry.token
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_output_tokens": 5000}, "max_output_tokens"), ({"input": "x" * 5000}, "input")],
)
async def test_what_is_too_long_is_named_as_this_api_names_it(rig, client, http, fields, param):
    error = (await http.post("/v1/responses", json=BODY | fields)).json()["error"]

    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"{param} can be at most" in error["message"] or f"shorten {param} " in error["message"]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"input": 3}, "input: valid string"),
        ({"input": []}, "input: at least 1 item"),
        ({"previous_response_id": ""}, "previous_response_id: must have at least 1 character"),
        ({"previous_response_id": "r" * 200}, "previous_response_id: at most 128 characters"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: has type 'input_image'",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0]: has type 'web_search_call'"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input: no earlier message",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: web_search, are not served"),
        (
            {"tools": [{**WEATHER, "parameters": {"description": "\ud800"}}]},
            "tools[0].parameters: surrogate",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"enum": ["\ud800"]}}}},
            "text.format.schema: surrogate",
        ),
        ({"background": True}, "background: is not supported here"),
        ({"conversation": "c"}, "conversation: use previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt: is not supported here"),
        (
            {"include": ["file_search_call.results"]},
            "include: 'file_search_call.results' is not supported",
        ),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata: at most 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: at most 512"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema: is required",
        ),
        ({"tools": [NOW, NOW]}, "tools[1].name: names an earlier tool"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "name": "then"}},
            "tool_choice.name: no tool is named 'then'",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens: greater than or equal to 1"),
        ({"top_logprobs": 21}, "top_logprobs: less than or equal to 20"),
        ({"truncation": "some"}, "truncation: 'auto' or 'disabled'"),
        ({"model": "other"}, "model: 'tiny'"),
    ],
)
async def test_bad_input_is_refused_by_name(rig, client, http, fields, fault):
    param, words = fault.split(": ", 1)
    reply = await http.post(
        "/v1/responses",
        content=json.dumps(BODY | fields),
        headers={"content-type": "application/json"},
    )
    error = reply.json()["error"]

    assert reply.status_code == (404 if "model" in fields else 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_that_the_engine_refuses_is_named_as_this_api_names_it(
    rig, client, http, stream
):
    rig.backend.error = RequestError("cannot be compiled", param=CONSTRAINT_PARAM)
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    reply = await http.post("/v1/responses", json=BODY | {"text": text, "stream": stream})
    error = reply.json()["error"]

    assert (error["param"], error["message"]) == ("text.format", "text.format: cannot be compiled")


async def test_a_conversation_that_cannot_be_cut_is_named_as_this_api_names_it(
    rig, client, http, monkeypatch
):
    rig.backend.max_model_len = 300
    encode = rig.tokenizer.encode_chat

    def encode_alternating(given):
        if given.messages[0]["role"] != "user":
            raise RequestError("messages must begin with the user's", param="messages")
        return encode(given)

    monkeypatch.setattr(rig.tokenizer, "encode_chat", encode_alternating)
    turns = [
        {"role": role, "content": "x" * 100} for role in ("user", "assistant", "user", "assistant")
    ]
    reply = await http.post("/v1/responses", json=BODY | {"input": turns, "truncation": "auto"})

    error = reply.json()["error"]

    assert (error["param"], error["message"]) == ("input", "input must begin with the user's")


async def test_a_failure_after_the_first_token_is_a_failed_response(rig, client):
    rig.backend.error, rig.backend.error_after = RuntimeError("broken"), 2
    *_, error, last = await streamed(client)

    assert (error.type, error.code) == ("error", "internal_error")
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "internal_error"
    assert "internal error" in last.response.error.message
    assert last.response.output[0].status == "incomplete"


def kept(num_bytes: int = 1) -> Kept:
    return Kept({}, [], (), num_bytes)


def test_what_is_kept_is_bounded_in_number_bytes_and_time():
    now = [0.0]
    store = ResponseStore(lambda: now[0], max_responses=2, max_bytes=10, max_seconds=5)

    def has(name: str) -> bool:
        with suppress(RequestError):
            store.get(name, b"")
            return True
        return False

    def ids() -> list[str]:
        return [name for name in ("a", "b", "c", "d") if has(name)]

    for name in ("a", "b", "c"):
        store.put(name, b"", kept())
    assert ids() == ["b", "c"]
    store.put("d", b"", kept(10))
    assert ids() == ["d"]
    store.put("a", b"", kept(11))
    assert ids() == ["d"]
    now[0] = 5.1
    assert ids() == []


@pytest.mark.parametrize("bounds", [{"max_responses": 4}, {"max_bytes": 4}])
def test_one_keys_responses_do_not_push_out_anothers(bounds):
    store = ResponseStore(**bounds)
    store.put("quiet", b"quiet", kept())
    for number in range(9):
        store.put(f"busy-{number}", b"busy", kept())

    assert store.get("quiet", b"quiet")
    assert store.get("busy-8", b"busy")
    assert store.get("busy-6", b"busy")
    with pytest.raises(RequestError):
        store.get("busy-5", b"busy")


@pytest.mark.parametrize(("items", "parts"), [(1000, 0), (10, 100), (1, 1000)])
def test_many_small_items_count_as_the_memory_they_take(items, parts):
    content = [{"type": "input_text", "text": ""}] * parts or ""
    tracemalloc.start()
    try:
        request = ResponsesRequest.model_validate(
            {"model": "tiny", "input": [{"role": "user", "content": content}] * items}
        )
        shown = shown_items(request.input, "a" * 32)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert taken / 2 < bytes_of(shown) < 2 * taken
