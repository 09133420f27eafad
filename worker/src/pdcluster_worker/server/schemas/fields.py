"""Field types of the request schemas: forms that OpenAI allows, and words for what is wrong."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pdcluster_schema.qos import Tier
from pdcluster_schema.text import quoted
from pdcluster_worker.messages.requests import IMAGE_URL
from pdcluster_worker.routing.qos.load_shedding import PRIORITIES

# Long lists stop at their first error (`fail_fast`): a million wrong items must not make as many.
MAX_MESSAGES = 10_000
MAX_PROMPTS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_SALT_CHARACTERS = 256
MAX_SESSION_CHARACTERS = 256
MAX_PRIORITY = 1000
"""Either way of 0, the default; lower goes first."""
MAX_DEADLINE_MILLISECONDS = 86_400_000.0
"""Longest deadline of a request's completion: a day, as a batch may take."""
MAX_SLO_MILLISECONDS = 3_600_000

Prompt = str | list[int]
ValueT = TypeVar("ValueT")


class Body(BaseModel):
    """Base of every request schema: strict, and silent about fields that it does not know."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def check_type(value: Any, known: Sequence[str], fix: str) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        raise no_value(f"has type {quoted(kind)}: {fix}")
    return value


def no_value(message: str) -> PydanticCustomError:
    # The message is data, not a template: braces in it must not be filled in.
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise no_value(f"character {e.start} is half of a surrogate pair, which is not text") from e
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
TextOr = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[ValueT, Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<string>"),
]
"""A text, or a list in its place."""


def _check_image_url(url: str) -> str:
    if not url.startswith(IMAGE_URL):
        raise no_value(
            f"begins with {quoted(url[:32])}, and no address is fetched here: send the image "
            "itself, as base64"
        )
    return url


ImageUrl = Annotated[Text, AfterValidator(_check_image_url)]
"""A URL that holds the image; its base64 is checked with the chat's."""


def is_sendable(value: Any) -> bool:
    """True if JSON in UTF-8 can carry it: no half of a surrogate pair, not nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def check_sendable(value: ValueT) -> ValueT:
    """Refuse, in a validator, what no answer and no prompt can carry."""
    if not is_sendable(value):
        raise no_value(
            "is nested too deeply, or has half of a surrogate pair in it, which is not text"
        )
    return value


CacheSalt = Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Session = Annotated[Text, Field(min_length=1, max_length=MAX_SESSION_CHARACTERS)]
StopList = Annotated[
    Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None,
    BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
]


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise no_value(f"has {len(value)} entries: at most {MAX_LOGIT_BIAS} are accepted")
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_check_size)
]
TokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]


def _priority(value: Any) -> int:
    if type(value) is int and abs(value) <= MAX_PRIORITY:
        return value
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    raise no_value(
        f"must be {', '.join(PRIORITIES)} or a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
    )


Priority = Annotated[int, PlainValidator(_priority, json_schema_input_type=int | Tier)]
SloMilliseconds = Annotated[float, Field(gt=0, le=MAX_SLO_MILLISECONDS)]
DeadlineMilliseconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE_MILLISECONDS)]


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str) and value:
        try:
            return _check_unicode(value)
        except PydanticCustomError as e:
            raise no_value(f"{path}{e.message()}") from e
    if isinstance(value, list) and _is_token_ids(value):
        return list(value)
    raise no_value(
        f"{path}must be a string that is not empty, or a list of token ids that is not empty"
    )


def _prompts(value: Any) -> list[Prompt]:
    if not isinstance(value, list) or not value or _is_token_ids(value):
        return [_prompt(value, "")]
    if len(value) > MAX_PROMPTS:
        raise no_value(
            f"has {len(value)} prompts: at most {MAX_PROMPTS} are accepted in one request"
        )
    return [_prompt(item, f"item {index} ") for index, item in enumerate(value)]


PromptList = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def join_parts(value: Any) -> Any:
    """Join texts; parts of a list with images stay apart."""
    if not isinstance(value, list):
        return value
    if any(type_of(part) == "image_url" for part in value):
        return [_part(part, index) for index, part in enumerate(value)]
    return "\n".join(_part_text(part, index) for index, part in enumerate(value))


def _part(part: Any, index: int) -> dict[str, Any]:
    if type_of(part) == "image_url":
        image = part.get("image_url")
        shown = {"url": image.get("url")} if isinstance(image, dict) else image
        return {"type": "image_url", "image_url": shown}
    return text_part(_check_unicode(_part_text(part, index)))


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise no_value(f"part {index} has type {quoted(kind)}: give text, or image_url")
    if kind is None or not isinstance(part.get("text"), str):
        raise no_value(f'part {index} must be {{"type": "text", "text": a string}}')
    return str(part["text"])


class Only:
    """Marks a field that is not served: values that change nothing pass, others are refused."""

    def __init__(self, *allowed: Any, fix: str = "") -> None:
        self._allowed = allowed
        self._fix = fix

    @property
    def advice(self) -> str:
        others = [repr(value) for value in self._allowed if value is not None]
        instead = f" or set it to {' or '.join(others)}" if others else ""
        return f"leave it out{instead}" + (f"; {self._fix}" if self._fix else "")

    def _check(self, value: Any) -> Any:
        # Types are compared too, for True == 1.
        if any(type(value) is type(allowed) and value == allowed for allowed in self._allowed):
            return value
        raise no_value(f"is not supported here: {self.advice}")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": list(self._allowed)}
