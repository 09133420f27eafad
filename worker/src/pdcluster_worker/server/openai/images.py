"""Images of a chat: their parts checked, and their places in the prompt that an engine rendered.

They go to engines as the client sent them, beside a prompt with one token in the place of each
(docs/design/engine-front-end.md), so a place must be one token, repeated.
"""

import binascii
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import field_error
from pdcluster_worker.messages.requests import IMAGE_URL, Image
from pdcluster_worker.server.schemas.chat_fields import Message
from pdcluster_worker.stock_engine.responses import Place

MAX_CHARACTERS = 48 << 20
"""Limit of a request's images as base64, counted for each answer: each runs as a request of its
own, which goes to other workers in one message.
"""

_BASE64 = ";base64"


class Features(msgspec.Struct):
    """Parts of a rendered prompt that are no text, by their kind."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Place]] = {}


def image_urls(messages: Sequence[Message], num_answers: int) -> list[str]:
    """Raises RequestError for one that an engine would fetch, or could not decode."""
    urls = list[str]()
    for number, message in enumerate(messages):
        for place, part in enumerate(message.parts):
            if part["type"] == "image_url":
                path = f"messages[{number}].content[{place}].image_url"
                urls.append(_checked_url(part["image_url"], path))
    size = sum(map(len, urls)) * num_answers
    if size > MAX_CHARACTERS:
        raise field_error(
            "messages",
            f"the images have {size} characters as base64, counted once for each of n answers: at "
            f"most {MAX_CHARACTERS} are accepted, send fewer or smaller ones, or a smaller n",
        )
    return urls


def _checked_url(image: Any, path: str) -> str:
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise field_error(path, f'must be {{"url": "{IMAGE_URL}png{_BASE64},..."}}')
    head, comma, data = url.partition(",")
    is_image = head.startswith(IMAGE_URL) and head.endswith(_BASE64) and head.isascii()
    if not is_image or not comma:
        raise field_error(
            f"{path}.url",
            f"begins with {quoted(url[:32])}, and no address is fetched here: send the image "
            f"itself, as {IMAGE_URL}png{_BASE64},...",
        )
    try:
        decoded = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as e:
        raise field_error(f"{path}.url", f"the image is not base64: {e}") from e
    if not decoded:
        raise field_error(f"{path}.url", "the image has no bytes: send them as base64")
    return url


def images_of(features: Features | None, urls: Sequence[str], prompt: list[int]) -> list[Image]:
    """Raises RequestError where places are not one token each: the engine could not widen them."""
    features = features or Features()
    places = features.mm_placeholders.get("image", [])
    digests = features.mm_hashes.get("image", [])
    if set(features.mm_placeholders) - {"image"}:
        raise field_error("messages", "only text and images of type image_url are taken here")
    if not len(places) == len(digests) == len(urls):
        raise field_error(
            "messages",
            f"the engine has a place for {len(places)} of the {len(urls)} images in its prompt: "
            "send text alone, or use a model whose chat template shows images",
        )
    return list(_placed(places, digests, urls, prompt))


def _placed(
    places: Sequence[Place], digests: Sequence[str], urls: Sequence[str], prompt: list[int]
) -> Iterator[Image]:
    for place, digest, url in zip(places, digests, urls, strict=True):
        tokens = set(prompt[place.offset : place.offset + place.length])
        if len(tokens) != 1:
            raise field_error(
                "messages",
                f"this model puts {len(tokens)} kinds of tokens in the place of an image, and "
                "images are taken where it is one token, repeated: send text alone, or use a model "
                "such as Qwen-VL or LLaVA",
            )
        yield Image(place.offset, place.length, digest, url)
