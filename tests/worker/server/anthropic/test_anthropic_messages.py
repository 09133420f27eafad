"""POST /v1/messages by Anthropic's official client, unchanged, and what the wire has beneath it."""

import re
from collections.abc import AsyncIterator

import anthropic
import httpx2
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.recorded_calls import HERMES_NOW

ASK = [{"role": "user", "content": "Hi"}]
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
BODY = {"model": "tiny", "max_tokens": 64, "messages": ASK}


@pytest.fixture
async def client(rig, model_folder) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Over a model with tools that thinks."""
    rig.tokenizer = Tokenizer.load(model_folder, "chatml-tools")
    rig.backend.max_model_len = 4000
    rig.policy = PolicyConfig()
    rig.app = rig.make_app(parsers=ParserNames(reasoning="qwen3"))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(rig.app), trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url="http://test", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def ask(client: anthropic.AsyncAnthropic, **fields):
    return client.messages.create(**BODY | fields)


def streaming(client: anthropic.AsyncAnthropic, **fields):
    return client.messages.stream(**BODY | fields)


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


@pytest.mark.parametrize("written", ['{"x": "\\ud800"}', '{"x": ' + "[" * 1500 + "]" * 1500 + "}"])
async def test_a_call_whose_input_json_cannot_carry_is_empty(rig, client, http, written):
    rig.say(written)
    choice = {"type": "tool", "name": "now"}
    reply = await http.post(
        "/v1/messages", json={**BODY, "max_tokens": 3500, "tools": [NOW], "tool_choice": choice}
    )

    assert reply.status_code == 200
    assert reply.json()["content"][0]["input"] == {}


async def test_tokens_are_counted_as_the_model_sees_them(rig, client):
    counted = await client.messages.count_tokens(
        model="tiny", messages=ASK, system="Be brief", tools=[NOW]
    )
    await ask(client, max_tokens=8, system="Be brief", tools=[NOW])

    assert counted.input_tokens == len(rig.backend.calls[0][0][0].prompt)


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
    async with rig.client(parsers=ParserNames(tools="mistral")) as http:
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


async def test_a_schema_that_the_engine_refuses_is_named_as_this_api_names_it(rig, http):
    rig.backend.error = RequestError("cannot be compiled", param=CONSTRAINT_PARAM)
    sampling_request = {
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    }
    reply = await http.post("/v1/messages", json=BODY | sampling_request)

    assert reply.json()["error"]["message"] == "output_config.format: cannot be compiled"


async def test_models_have_what_anthropics_client_reads(rig, client):
    rig.backend.adapters = {"sql": ""}
    one, page = await client.models.retrieve("sql"), await client.models.list()

    assert (one.type, one.id, one.display_name) == ("model", "sql", "sql")
    assert one.created_at.timestamp() == one.created
    assert [each.id async for each in page] == ["tiny", "sql"]
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "sql", False)
