"""Chats and completions through an engine's own front end, over a played one.

It takes and gives what vLLM's endpoints do; tests/system/test_stock_front_end.py asks vLLM itself.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from pdcluster_worker.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from pdcluster_worker.server.openai.engine_front_end import EngineFrontEnd
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.conftest import Rig
from tests.worker.server.openai.played_engine import PlayedEngine

ASK = [{"role": "user", "content": "Weather?"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture
def engine(rig: Rig) -> PlayedEngine:
    rig.backend.max_model_len = 4000
    return PlayedEngine(rig.tokenizer)


@pytest.fixture
async def client(rig: Rig, engine: PlayedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(rig, engine) as client:
        yield client


def client_of(rig: Rig, engine: PlayedEngine) -> openai.AsyncOpenAI:
    return rig.openai(front_end=EngineFrontEnd(engine.ask))


def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASK, **fields})


async def test_a_chat_is_rendered_and_read_by_the_engine(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    rig.say("~hm|Sunny.")

    answer = await chat(client, reasoning_effort="high")

    message, usage = answer.choices[0].message, answer.usage
    assert (message.reasoning, message.content) == ("~hm", "Sunny.")
    assert answer.choices[0].finish_reason == "stop"
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, 11)
    assert rig.prompt() == "Weather?"
    (render,), (derender,) = engine.of("/render"), engine.of("/derender")
    assert render["messages"] == ASK
    assert render["reasoning_effort"] == "high"
    assert derender["chat_request"]["messages"] == []
    # the token that ended it is counted, and not read
    assert 258 not in derender["generate_response"]["choices"][0]["token_ids"]
    assert derender["prompt_token_ids"] == rig.spec.prompt


@pytest.mark.parametrize("streams", [False, True])
async def test_calls_come_out_as_ours_do(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI, streams: bool
) -> None:
    engine.form = {"structural_tag": "{}"}
    rig.say('~so|On it@now {"zone": "UTC"}')

    answer = await chat(client, tools=[NOW], stream=streams)

    if streams:
        deltas = [chunk.choices[0] async for chunk in answer]
        calls = [call for each in deltas for call in each.delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function.name] == ["now"]
        arguments = "".join(call.function.arguments or "" for call in calls)
        content = "".join(each.delta.content or "" for each in deltas)
        reason = deltas[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        arguments, content = call.function.arguments, answer.choices[0].message.content
        reason = answer.choices[0].finish_reason
        assert call.function.name == "now"
    assert json.loads(arguments) == {"zone": "UTC"}
    assert (content, reason) == ("On it", "tool_calls")
    constraint = rig.spec.sampling.constraint
    assert constraint is not None
    assert constraint.kind == "rendered"
    form = json.loads(constraint.text)
    assert form["sampling_params"] == {"structured_outputs": engine.form}
    assert form["reasoning_ended"] is False


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "reason"), [("@now {}", None, "tool_calls"), ("a END b", "END", "stop")]
)
async def test_the_end_is_logged_with_the_reason_that_the_client_gets(
    rig: Rig,
    client: openai.AsyncOpenAI,
    caplog: pytest.LogCaptureFixture,
    *,
    text: str,
    stop: str | None,
    reason: str,
    streams: bool,
) -> None:
    caplog.set_level("INFO", logger="pdcluster_worker")
    rig.say(text)
    most = len(text) if stop else None  # the engine itself would end it by its length

    answer = await chat(client, tools=[NOW], stop=stop, stream=streams, n=2, max_tokens=most)
    if streams:
        chunks = [chunk.choices[0] async for chunk in answer]
        given = {chunk.finish_reason for chunk in chunks} - {None}
    else:
        given = {choice.finish_reason for choice in answer.choices}

    (ended,) = [vars(record)["fields"] for record in caplog.records if hasattr(record, "fields")]
    assert given == {ended["reason"]} == {reason}


async def test_a_named_call_ends_by_stop(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.say("@now {}")

    named = {"type": "function", "function": {"name": "now"}}
    answer = await chat(client, tools=[NOW], tool_choice=named, stop="{")

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize("n", [1, 3])
async def test_streams_of_all_choices_are_whole_and_ask_at_a_bounded_rate(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI, n: int
) -> None:
    engine.delay = 0.01
    text = "~think|" + "word " * 40
    rig.say(text)

    stream = await chat(client, stream=True, n=n, stream_options={"include_usage": True})
    texts, reasoning, usage = {}, {}, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            texts[choice.index] = texts.get(choice.index, "") + (delta.content or "")
            thought = delta.model_extra.get("reasoning") or ""
            reasoning[choice.index] = reasoning.get(choice.index, "") + thought

    assert list(texts.values()) == ["word " * 40] * n
    assert list(reasoning.values()) == ["~think"] * n
    assert usage.completion_tokens == n * (len(text) + 1)
    assert engine.most_open <= 4
    assert len(engine.of("/derender")) < n * len(text)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_ends_the_text_and_the_choice_that_has_it(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI, streams: bool
) -> None:
    rig.say("one two END three")
    rig.backend.hold_after = 14 if streams else None

    async with asyncio.timeout(10):
        answer = await chat(client, stop="END", stream=streams)
        if streams:
            chunks = [chunk.choices[0] async for chunk in answer]
            text, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
        else:
            text = answer.choices[0].message.content
            reason = answer.choices[0].finish_reason

    assert (text, reason) == ("one two ", "stop")
    assert not streams or rig.backend.cancelled.is_set()


async def test_an_answer_without_a_token_to_read_is_empty(
    rig: Rig, client: openai.AsyncOpenAI
) -> None:
    rig.say("")

    answer = await chat(client)

    assert answer.choices[0].message.content == ""


async def test_completions_are_rendered_echoed_and_read(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    rig.say("!")

    answer = await client.completions.create(
        model="tiny", prompt=["Hello", "Bye"], echo=True, n=2, logprobs=0
    )
    ids = await client.completions.create(model="tiny", prompt=[72, 73], echo=True)

    assert [choice.text for choice in answer.choices] == ["Hello!"] * 2 + ["Bye!"] * 2
    assert answer.choices[0].logprobs.tokens[-2] == "!"
    assert ids.choices[0].text == f"{rig.tokenizer.decode([72, 73])}!"
    assert [call["prompt"] for call in engine.of("/render")] == [["Hello", "Bye"]]


async def test_tokens_are_counted_by_the_engine(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    http = client._client
    tokenized = await http.post("http://test/tokenize", json={"prompt": "Hello"})
    of_chat = await http.post("http://test/tokenize", json={"messages": ASK})
    text = await http.post("http://test/detokenize", json={"tokens": [72, 73]})

    assert tokenized.json()["count"] == 4
    assert of_chat.json()["count"] == 8
    assert text.json() == {"prompt": rig.tokenizer.decode([72, 73])}
    assert len(engine.calls) == 3


async def test_faults_of_the_request_are_the_engine_s_words(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="refuses the request: no such role"):
        await chat(client, messages=[{"role": "user", "content": "refuse"}])
    engine.form = {"grammar": "x" * 140_000}
    with pytest.raises(openai.BadRequestError, match="send fewer or smaller schemas"):
        await chat(client)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_cannot_be_read_is_reported(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI, streams: bool
) -> None:
    rig.say("Hi")
    engine.error = RequestError("the engine refuses the request: invalid stream_state")
    with pytest.raises(openai.InternalServerError, match="could not read the answer: the engine"):
        await chat(client, stream=streams)
    engine.error = RequestError("no engine", status=503, code="no_front_end")
    with pytest.raises(openai.InternalServerError, match="no engine") as refused:
        await chat(client, stream=streams)
    assert refused.value.status_code == 503


async def test_a_client_that_leaves_ends_the_request(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    rig.say("one two three")
    rig.backend.hold_after = 5
    prepared = asyncio.create_task(chat(client))
    await asyncio.wait_for(rig.backend.holding.wait(), 10)
    prepared.cancel()
    await asyncio.wait_for(rig.backend.cancelled.wait(), 10)


async def test_a_model_without_a_tokenizer_file_serves_but_names_no_tokens(
    rig: Rig, engine: PlayedEngine, tmp_path: Any
) -> None:
    rig.say("Hi")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}))
    rig.tokenizer = Tokenizer.of_engine(tmp_path)
    async with client_of(rig, engine) as client:
        answer = await chat(client)
        named = await chat(client, logprobs=True, extra_body={"return_tokens_as_token_ids": True})
        with pytest.raises(openai.BadRequestError, match=r"no tokenizer\.json"):
            await chat(client, logprobs=True)

    assert answer.choices[0].message.content == "Hi"
    assert named.choices[0].logprobs.content[0].token.startswith("token_id:")


async def test_a_conversation_that_the_engine_finds_too_long_is_cut_with_truncation_auto(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    rig.say("Yes.")
    engine.longest = 100
    turns: Any = [{"role": "user", "content": f"turn {number:2} {'x' * 12}"} for number in range(9)]

    with pytest.raises(openai.BadRequestError, match="it is too long") as refused:
        await client.responses.create(model="tiny", input=turns)
    assert refused.value.code == CONTEXT_LENGTH_EXCEEDED
    await client.responses.create(model="tiny", input=turns, truncation="auto")
    assert rig.prompt() == "".join(turn["content"] for turn in turns[-5:])
    with pytest.raises(openai.BadRequestError, match="it is too long"):
        await client.responses.create(model="tiny", input="x" * 101, truncation="auto")
