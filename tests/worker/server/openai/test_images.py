"""Images of chats, messages and responses through an engine's own front end, over a played one."""

import base64
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import anthropic
import httpx2
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


@pytest.fixture
async def messages(rig: Rig, engine: PlayedEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    app = rig.make_app(front_end=EngineFrontEnd(engine.ask))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url="http://test", api_key="none", max_retries=0, http_client=http
    ) as client:
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
        (shown("data:image/png;base64,!!!!"), "the image is not base64"),
        (shown("data:image/png;base64,"), "the image has no bytes"),
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


def block(data_url: str = "", **source: Any) -> dict[str, Any]:
    """One of Anthropic's API."""
    held = {"type": "base64", "media_type": "image/png", "data": data_url.partition(",")[2]}
    return {"type": "image", "source": source or held}


def part(url: str, **fields: Any) -> dict[str, Any]:
    """One of OpenAI's Responses API."""
    return {"type": "input_image", "image_url": url, "detail": "auto", **fields}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


async def send(messages: anthropic.AsyncAnthropic, *blocks: Any, role: str = "user") -> Any:
    asked: Any = [{"role": role, "content": list(blocks)}]
    return await messages.messages.create(model="tiny", max_tokens=64, messages=asked)


async def test_blocks_of_messages_go_to_the_engine_as_parts_of_a_chat(
    rig: Rig, engine: PlayedEngine, messages: anthropic.AsyncAnthropic
) -> None:
    reply = await send(messages, text("Is"), block(RED), block(type="url", url=BLUE))

    assert reply.content[0].text == "Red."
    (render,) = engine.of("/render")
    assert render["messages"] == [
        {"role": "user", "content": [text("Is"), shown(RED), shown(BLUE)]},
    ]
    assert [image.url for image in rig.spec.images] == [RED, BLUE]
    counted = await messages.messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": [text("Is"), block(RED)]}]
    )
    assert counted.input_tokens == len(rig.tokenizer.encode(["Is"])[0]) + 3


@pytest.mark.parametrize("is_error", [False, True])
async def test_a_tool_may_answer_with_an_image(
    engine: PlayedEngine, messages: anthropic.AsyncAnthropic, is_error: bool
) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": is_error}
    asked: Any = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [{**result, "content": [block(RED)]}, text("Well?")]},
    ]
    await messages.messages.create(model="tiny", max_tokens=64, messages=asked)

    (render,) = engine.of("/render")
    content = [text("Error: "), shown(RED)] if is_error else [shown(RED)]
    assert render["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": content}
    assert render["messages"][3]["content"] == "Well?"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([block(type="url", url="https://example.com/a.png")],
         r"content\[0\]\.source\.url: begins with .*no address is fetched here"),
        ([block(type="file", file_id="f")], r"source: has type 'file': send the image itself"),
        ([block(type="base64", media_type="text/plain", data="aGk=")],
         r"source\.media_type: must be 'image/jpeg'"),
        ([block(type="base64", media_type="image/png", data="!!!!")],
         "messages: the image is not base64"),
        ([block(type="base64", media_type="image/png")], r"source\.data: is required"),
        ([{"type": "document"}], "has type 'document': blocks of type text, image, thinking"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
         "has type 'document': give text, in blocks of type text, or images"),
    ],
)  # fmt: skip
async def test_a_block_that_is_no_image_is_refused(
    engine: PlayedEngine, messages: anthropic.AsyncAnthropic, blocks: Any, message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message):
        await send(messages, *blocks)

    assert engine.calls == []


async def test_images_of_the_assistant_are_refused_in_both_apis(
    client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="type image belongs to role user"):
        await send(messages, block(RED), role="assistant")
    items: Any = [{"role": "assistant", "content": [part(RED)]}]
    with pytest.raises(openai.BadRequestError, match="input: a message of role assistant has an"):
        await client.responses.create(model="tiny", input=items)


async def test_input_images_of_responses_go_to_the_engine_as_parts_of_a_chat(
    rig: Rig, engine: PlayedEngine, client: openai.AsyncOpenAI
) -> None:
    said = {"type": "input_text", "text": "Is"}
    items: Any = [{"role": "user", "content": [said, part(RED)]}]
    first = await client.responses.create(model="tiny", input=items)
    listed = await client.responses.input_items.list(first.id)
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [part(BLUE)]}
    further: Any = [call, output]
    await client.responses.create(model="tiny", input=further, previous_response_id=first.id)

    assert first.output_text == "Red."
    kept = listed.data[0].to_dict()["content"]
    assert kept == [said, part(RED)]
    render, second = engine.of("/render")
    user = {"role": "user", "content": [text("Is"), shown(RED)]}
    assert render["messages"] == [user]
    assert second["messages"][0] == user
    assert second["messages"][-1] == {
        "role": "tool", "tool_call_id": "c1", "content": [shown(BLUE)],
    }  # fmt: skip
    assert [image.url for image in rig.spec.images] == [RED, BLUE]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (part("https://example.com/a.png"),
         r"content\[0\]\.image_url: begins with .*no address is fetched here"),
        ({"type": "input_image", "file_id": "f"}, r"content\[0\]\.image_url: is required"),
        (part(RED, file_id="f"), "file_id: is not supported here: leave it out; send the image"),
        (part("data:image/png;base64,!!!!"), "input: the image is not base64"),
        ({"type": "input_file"}, "has type 'input_file': give text or images"),
    ],
)  # fmt: skip
async def test_a_part_of_a_response_that_is_no_image_is_refused(
    engine: PlayedEngine, client: openai.AsyncOpenAI, given: Any, message: str
) -> None:
    items: Any = [{"role": "user", "content": [given]}]
    with pytest.raises(openai.BadRequestError, match=message):
        await client.responses.create(model="tiny", input=items)

    assert engine.calls == []


async def test_a_model_of_text_refuses_images_by_name_in_every_api(
    engine: PlayedEngine, client: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic
) -> None:
    engine.refuses_images = "tiny is not a multimodal model"
    items: Any = [{"role": "user", "content": [part(RED)]}]

    with pytest.raises(openai.BadRequestError, match=engine.refuses_images):
        await chat(client, shown(RED))
    with pytest.raises(openai.BadRequestError, match=engine.refuses_images):
        await client.responses.create(model="tiny", input=items)
    with pytest.raises(anthropic.BadRequestError, match=engine.refuses_images):
        await send(messages, block(RED))


async def test_our_own_front_end_says_what_images_of_other_apis_need(rig: Rig) -> None:
    items: Any = [{"role": "user", "content": [part(RED)]}]
    async with rig.openai() as client:
        with pytest.raises(
            openai.BadRequestError, match=r"input: .* needs model\.frontend: engine"
        ):
            await client.responses.create(model="tiny", input=items)
