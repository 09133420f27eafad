"""Images of requests at a stock engine: one token in the place of each, and answers to that prompt
alone.
"""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.requests import Image, RequestSpec, SamplingParams, TransferTarget
from tests.worker.stock_engine.fake_vllm import TRANSFER
from tests.worker.stock_engine.rig import Rig, rigged

RED, BLUE = "data:image/png;base64,cmVk", "data:image/png;base64,Ymx1ZQ=="
PROMPT = [1, 9, 9, 9, 2, 9, 9, 3]
NARROW = [1, 9, 2, 9, 3]
TARGET = TransferTarget(bytes(16), "e", ["h:1"], 0, [1])
PLACES = [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}]


def spec(**fields: Any) -> RequestSpec:
    images = [Image(1, 3, "red", RED), Image(5, 2, "blue", BLUE)]
    return RequestSpec("r", PROMPT, SamplingParams(max_tokens=4, seed=0), images=images, **fields)


def chunk(prompt: list[int], places: list[dict[str, int]], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length"}
    seen = {"prompt_token_ids": prompt, "mm_placeholders": {"image": places}}
    return {"choices": [choice], **seen, **fields}


async def stream(rig: Rig, request: RequestSpec, first: dict[str, Any]) -> dict[str, Any]:
    """The body of a request that is answered with such a first chunk."""
    rig.engine.take(messages.Submit(request))
    call = await rig.call()
    await call.begin()
    await call.send(b"data: " + json.dumps(first).encode() + b"\n\n")
    await call.send(b"data: [DONE]\n\n")
    return call.body


@pytest.mark.parametrize("output", [[], [9, 4]], ids=["new", "moved"])
async def test_a_prompt_has_one_token_for_each_image(output: list[int]) -> None:
    async with rigged() as rig:
        body = await stream(rig, spec(output=output), chunk([*PROMPT, *output], PLACES))
        tokens = await rig.tokens()

    assert tokens == [7]
    assert body["token_ids"] == [*NARROW, *output]
    assert body["content_parts"] == [{"type": "image_url", "url": url} for url in (RED, BLUE)]
    assert body["return_token_ids"] is True


@pytest.mark.parametrize(
    "first",
    [
        chunk(PROMPT, [{"offset": 1, "length": 3}, {"offset": 5, "length": 1}]),
        chunk(PROMPT, PLACES[:1]),
        chunk([*PROMPT, 9], PLACES),
        {"choices": [{"index": 0, "token_ids": [7], "finish_reason": "length"}]},
    ],
    ids=["length", "number", "prompt", "unsaid"],
)
async def test_an_answer_to_another_prompt_is_refused(first: dict[str, Any]) -> None:
    async with rigged() as rig:
        await stream(rig, spec(), first)
        failed = await rig.said(messages.RequestFailed)

    assert failed.is_refusal
    assert failed.param == "messages"
    assert "puts the images of this prompt elsewhere" in failed.message


async def test_a_prefill_for_a_peer_has_the_images_and_is_checked() -> None:
    async with rigged() as rig:
        for places, outcome in ((PLACES, messages.PrefillDone), ([], messages.RequestFailed)):
            rig.engine.take(messages.Prefill(spec(), TARGET))
            call = await rig.call()
            assert call.body["token_ids"] == NARROW
            assert len(call.body["content_parts"]) == 2
            answer = chunk(PROMPT, places, kv_transfer_params=TRANSFER)
            await call.answer(json.dumps(answer).encode())
            await rig.said(outcome)


async def test_a_fetch_has_the_images_too() -> None:
    async with rigged() as rig:
        call = await rig.fetch(spec())

        assert call.body["token_ids"] == NARROW
        assert len(call.body["content_parts"]) == 2
        assert call.body["kv_transfer_params"] == TRANSFER


async def test_a_prompt_without_images_is_not_requested_again() -> None:
    async with rigged() as rig:
        body = await stream(rig, replace(spec(), images=[]), chunk([], []))
        await rig.tokens()

    assert body["token_ids"] == PROMPT
    assert body.keys().isdisjoint({"content_parts", "return_token_ids"})
