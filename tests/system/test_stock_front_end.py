"""Prompts and answers through the front end of a real vLLM, beside one mixed worker.

It takes minutes, so it runs where PDCLUSTER_TEST_VLLM is set.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.chat_model import FOLDER as CHAT_MODEL
from tests.system.client import MODEL
from tests.system.cluster import NewCluster
from tests.system.stock_vllm import (
    FOLDER,
    LEASE_SECONDS,
    MAX_MODEL_LEN,
    START_SECONDS,
    SWITCH,
    stock_engine,
)
from tests.system.vision_models import png

PARSERS = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
ASK = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(SWITCH)
        or not (FOLDER / ".ready").is_file()
        or not (CHAT_MODEL / "tokenizer.json").is_file(),
        reason=f"set {SWITCH}=1, after bench/peers/install_vllm.sh {FOLDER} and make model",
    ),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def client(open_cluster: NewCluster) -> Iterator[openai.OpenAI]:
    with open_cluster("front-end") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        worker = cluster.add_worker("mixed", "front-end-0", model=CHAT_MODEL, start=False)
        engine = stock_engine(CHAT_MODEL, "mixed")
        engine["vllm"]["command"] += PARSERS
        worker.settings["engine"] = engine
        worker.settings["model"]["frontend"] = "engine"
        worker.start()
        worker.wait_ready(START_SECONDS)
        yield openai.OpenAI(
            base_url=f"{worker.client.http.base_url}/v1".replace("//v1", "/v1"),
            api_key="none",
            max_retries=0,
        )


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 64, **fields}
    return client.chat.completions.create(**given)


def test_a_stream_has_the_text_of_a_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, n=2)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [choice.message.content for choice in whole.choices] == [streamed] * 2
    assert "<|im_end|>" not in streamed
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens / 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_forced_call_has_its_form(client: openai.OpenAI, streams: bool) -> None:
    answer = chat(client, tools=[WEATHER], tool_choice="required", stream=streams)

    if streams:
        chunks = list(answer)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(call.function.arguments or "" for call in calls)
        name, reason = calls[0].function.name, chunks[-1].choices[0].finish_reason
    else:
        call = answer.choices[0].message.tool_calls[0]
        name, arguments, reason = (
            call.function.name,
            call.function.arguments,
            answer.choices[0].finish_reason,
        )
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert reason in ("tool_calls", "length")


def test_a_stop_string_ends_a_whole_answer_where_it_comes(client: openai.OpenAI) -> None:
    answer = chat(client, stop="e")

    assert answer.choices[0].finish_reason == "stop"
    assert "e" not in answer.choices[0].message.content
    assert answer.usage.completion_tokens < 64


def test_completions_are_echoed(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "2+2="]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, echo=True
    )

    assert [
        choice.text.startswith(prompt)
        for choice, prompt in zip(answer.choices, prompts, strict=True)
    ] == [True, True]


def test_what_vllm_refuses_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the engine refuses the request"):
        chat(client, messages=[{"role": "user", "content": "x " * 3000}])
    image = {"type": "image_url", "image_url": {"url": png(255, 0, 0)}}
    with pytest.raises(openai.BadRequestError, match="is not a multimodal model"):
        chat(client, messages=[{"role": "user", "content": [image]}])


@pytest.mark.parametrize("num_words", [20, 200], ids=["tokens", "characters"])
def test_a_long_conversation_is_cut_with_truncation_auto(
    client: openai.OpenAI, num_words: int
) -> None:
    turns = [
        {"role": "user", "content": f"turn {number} " + "word " * num_words} for number in range(60)
    ]

    def ask(**fields: Any) -> Any:
        return client.responses.create(model=MODEL, input=turns, max_output_tokens=8, **fields)

    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        ask()
    assert refused.value.code == "context_length_exceeded"
    least = MAX_MODEL_LEN - 8 - 2 * (num_words + 20)
    assert least < ask(truncation="auto").usage.input_tokens <= MAX_MODEL_LEN - 8
