"""Images of a chat through an engine's own front end, over a played one."""

import base64
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import openai
import pytest

from pdcluster_worker.messages.requests import Image
from pdcluster_worker.server.openai import images
from pdcluster_worker.server.openai.engine_front_end import EngineFrontEnd
from tests.worker.server.conftest import Rig
from tests.worker.server.openai.played_engine import IMAGE, PlayedEngine

RED, BLUE = (
    f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}" for name in ("red", "blue")
)


@pytest.fixture
def engine(rig: Rig) -> PlayedEngine:
    rig.say("Red.")
    return PlayedEngine(rig.tokenizer)


@pytest.fixture
async def client(rig: Rig, engine: PlayedEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with rig.openai(front_end=EngineFrontEnd(engine.ask)) as client:
        yield client


def shown(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(client: openai.AsyncOpenAI, *parts: Any, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Is"}, *parts]}]
    return client.chat.completions.create(model="tiny", messages=messages, **fields)


def digest(url: str) -> str:
    return sha256(url.encode()).hexdigest()


async def test_images_go_along_with_their_places_in_the_prompt(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    red = {**shown(RED), "uuid": "blue"}  # would be vLLM's hash of it
    red["image_url"]["detail"] = "high"
    answer = await chat(client, red, {"type": "text", "text": "Hi"}, shown(BLUE), n=2)

    assert answer.choices[0].message.content == "Red."
    texts = rig.tokenizer.encode(["Is", "Hi"])
    assert rig.spec.prompt == [*texts[0], *[IMAGE] * 3, *texts[1], *[IMAGE] * 3]
    specs = rig.backend.calls[-1][0]
    assert [spec.images for spec in specs] == [
        [Image(2, 3, digest(RED), RED), Image(7, 3, digest(BLUE), BLUE)]
    ] * 2
    assert [len(text) for text in texts] == [2, 2]
    (render,), (derender, _) = engine.of("/render"), engine.of("/derender")
    assert render["mm_payload"] == "none"
    assert render["messages"][0]["content"][1] == shown(RED)
    assert derender["chat_request"]["messages"] == []


@pytest.mark.parametrize("streams", [False, True])
async def test_images_of_a_message_with_calls_are_sent_to_the_engine_once(
    engine: PlayedEngine, client: openai.AsyncOpenAI, streams: bool
) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    asked = {"role": "user", "content": "Time?"}
    called = {"role": "assistant", "content": [shown(RED)], "tool_calls": calls}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "Noon"}
    messages: Any = [asked, called, answered]
    answer: Any = await client.chat.completions.create(
        model="tiny", messages=messages, stream=streams
    )
    if streams:
        _ = [chunk async for chunk in answer]

    (render,), derenders = engine.of("/render"), engine.of("/derender")
    assert render["messages"][1]["content"] == [shown(RED)]
    assert derenders
    for derender in derenders:
        kept = derender["chat_request"]["messages"]
        assert kept == [{"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (shown("https://example.com/a.png"), "no address is fetched here: send the image itself"),
        (shown("file:///etc/passwd"), "no address is fetched here"),
        (shown("data:text/plain;base64,aGk="), "send the image itself, as data:image/png;base64"),
        (shown("data:image/é;base64,aGk="), "send the image itself, as data:image/png;base64"),
        (shown("data:image/png,raw"), "send the image itself, as data:image/png;base64"),
        (shown("data:image/png;base64,!!!!"), "is not base64 after the comma"),
        (shown("data:image/png;base64,"), "has no data after the comma"),
        (shown(7), r"image_url: must be \{\"url\": \"data:image/png;base64"),
        ({"type": "image_url", "image_url": RED}, r"must be \{\"url\""),
        ({"type": "image_url"}, r"must be \{\"url\""),
        ({"type": "video_url"}, "part 1 has type 'video_url': give text, or image_url"),
        ({"type": "input_audio"}, "part 1 has type 'input_audio': give text, or image_url"),
    ],
)
async def test_a_part_that_is_no_image_is_refused(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI, part: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await chat(client, part)

    assert engine.calls == []
    assert rig.backend.calls == []


async def test_images_have_a_limit_for_all_answers_together(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_CHARACTERS", 2 * len(RED))

    await chat(client, shown(RED), shown(RED))
    await chat(client, shown(RED), n=2)
    for parts, n in (([shown(RED)] * 2, 2), ([shown(RED)] * 3, 1)):
        with pytest.raises(openai.BadRequestError, match="send fewer or smaller ones"):
            await chat(client, *parts, n=n)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"mm_placeholders": {"video": [{"offset": 0, "length": 1}]}}, "only text and images"),
        ({"mm_hashes": {"image": []}}, "a place for 0 of the 1 images in its prompt"),
    ],
)
async def test_an_engine_that_sees_something_else_is_reported(
    engine: PlayedEngine, client: openai.AsyncOpenAI, features: Any, message: str
) -> None:
    engine.features = features
    with pytest.raises(openai.BadRequestError, match=message):
        await chat(client, shown(RED))


async def test_a_place_of_several_kinds_of_tokens_is_refused(
    engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    engine.place = [IMAGE, IMAGE, IMAGE + 1]
    with pytest.raises(openai.BadRequestError, match="puts 2 kinds of tokens in the place"):
        await chat(client, shown(RED))


async def test_our_own_front_end_says_what_images_need(rig: Rig) -> None:
    async with rig.openai() as client:
        with pytest.raises(openai.BadRequestError, match=r"needs model\.frontend: engine"):
            await chat(client, shown(RED))
