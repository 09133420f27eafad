"""POST /v1/responses by OpenAI's official client, unchanged: whole, streamed, with tools, and going
on from what is kept.
"""

import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress

import openai
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.responses.formatter import shown_items
from pdcluster_worker.server.responses.route import Kept, ResponseStore, bytes_of
from pdcluster_worker.server.responses.schemas import ResponsesRequest
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.recorded_calls import HERMES_NOW

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
    async with rig.openai(parsers=ParserNames(reasoning="qwen3")) as client:
        yield client


def ask(client: openai.AsyncOpenAI, **fields):
    return client.responses.create(**BODY | fields)


async def streamed(client, **fields) -> list:
    """All events of a stream, numbered without a gap."""
    stream = await ask(client, stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_the_official_streaming_helper_takes_the_events(rig, client):
    async with client.responses.stream(model="tiny", input="Hi") as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        final = await stream.get_final_response()

    assert text == final.output_text == "Hello, world!"


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
    async with rig.client(tenant_of=lambda key: key if key in ("alice", "bob") else None) as http:
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


async def test_a_format_that_the_engine_refuses_is_named_as_this_api_names_it(rig, client, http):
    rig.backend.error = RequestError("cannot be compiled", param=CONSTRAINT_PARAM)
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    reply = await http.post("/v1/responses", json=BODY | {"text": text})
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
