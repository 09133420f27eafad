"""Fields of a chat request, their types and sizes: messages, tools, and the use of the template."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError

from pdcluster_schema.text import quoted
from pdcluster_worker.server.schemas.fields import (
    MAX_MESSAGES,
    Body,
    Only,
    Text,
    TextOr,
    check_sendable,
    join_parts,
    no_value,
)
from pdcluster_worker.server.text.chat_template import SPECIAL_TOKENS

MAX_DEPTH = 64
"""Deepest nesting of schemas."""

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def check_parameters(schema: dict[str, Any]) -> str | None:
    """Describe the fault of a schema and its place; None where there is none.

    >>> check_parameters({"type": "object", "properties": {"x": {"type": "string", "enum": 1}}})
    'properties.x.enum: must be a list of values that is not empty'
    """
    kind = schema.get("type", "object")
    if kind != "object":
        return f"type: must be object, as arguments are one, not {quoted(kind)}"
    return _check(schema, "", 0)


def _check(schema: Any, path: str, depth: int) -> str | None:
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{_at(path)}must be a schema: an object, true or false, not {quoted(schema)}"
    if depth > MAX_DEPTH:
        return f"{_at(path)}schemas are nested more than {MAX_DEPTH} deep: make it flatter"
    own = _own_fault(schema)
    if own is not None:
        return f"{path}{own}"
    return next(
        (
            wrong
            for name, inner in _inner(schema)
            if (wrong := _check(inner, f"{path}{name}.", depth + 1)) is not None
        ),
        None,
    )


def _own_fault(schema: dict[str, Any]) -> str | None:
    kinds = schema.get("type", [])
    wrong = next(
        (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in _TYPES),
        None,
    )
    if wrong is not None:
        return (
            f"type: must be one of {', '.join(_TYPES[:-1])} and {_TYPES[-1]}, not {quoted(wrong)}"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required: must be a list of names"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return "enum: must be a list of values that is not empty"
    for name in _MAPS:
        if not isinstance(schema.get(name, {}), dict):
            return f"{name}: must be an object of schemas by name"
    for name in _LISTS:
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            return f"{name}: must be a list of schemas that is not empty"
    return None


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        yield from ((f"{name}.{key}", inner) for key, inner in schema.get(name, {}).items())
    for name in _LISTS:
        yield from (
            (f"{name}.{number}", inner) for number, inner in enumerate(schema.get(name, ()))
        )
    yield from (
        (name, schema[name])
        for name in _SINGLE
        if name in schema and not isinstance(schema[name], list)
    )


def _at(path: str) -> str:
    return f"{path.removesuffix('.')}: " if path else ""


MAX_TOOLS = 128
"""OpenAI's."""
MAX_TOOL_NAME = 128
MAX_CALLS = 128
MAX_ID_CHARACTERS = 256
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_CHARACTERS = 16_384

RESERVED_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "chat_template", "tokenize", "return_dict"),
        *("add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
        *SPECIAL_TOKENS,
    }
)
"""Arguments of a template that come in other ways than `chat_template_kwargs`."""

ToolName = Annotated[
    str, Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=r"^[A-Za-z0-9_.:/-]+$")
]
CallId = Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _checked_parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    wrong = None if value is None else check_parameters(value)
    if wrong is not None:
        raise no_value(wrong)
    return check_sendable(value)


class FunctionTool(Body):
    """A function that the model may call.

    parameters: the JSON schema of its arguments; null = it has none.
    strict:     its arguments are kept to that schema also where the model decides by itself to call
                it.
    """

    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_checked_parameters)] = None
    strict: bool | None = None


class ToolField(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The function that must be called."""

    name: ToolName


class NamedToolChoice(Body):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required") or value is None:
        return value
    try:
        return NamedToolChoice.model_validate(value)
    except ValidationError as e:
        raise no_value(
            'must be none, auto, required or {"type": "function", "function": {"name": the name of '
            "a tool}}"
        ) from e


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | None


class CalledFunctionField(Body):
    """A call in the history; arguments: JSON of an object, or as much of it as was made."""

    name: Annotated[Text, Field(min_length=1, max_length=MAX_TOOL_NAME)]
    arguments: Text


class ToolCallField(Body):
    """One of a message's `tool_calls`."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunctionField


MessageContent = Annotated[
    TextOr[list[dict[str, Any]]] | None,
    BeforeValidator(join_parts, json_schema_input_type=str | list[dict[str, Any]] | None),
]


class Message(Body):
    """One message; `name` is ignored, `developer` is shown to the model as `system`.

    content:      null only of role assistant; a list where parts of it are images.
    tool_call_id: of role tool, the call that this answers.
    reasoning, reasoning_content: of role assistant, what came before its answer; two names of one
                                  thing.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent = None
    tool_calls: (
        Annotated[list[ToolCallField], Field(max_length=MAX_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: CallId | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    function_call: Annotated[Any, Only(None, fix="use tool_calls")] = None
    audio: Annotated[Any, Only(None)] = None

    @property
    def parts(self) -> list[dict[str, Any]]:
        return self.content if isinstance(self.content, list) else []

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else ""


def _bounded(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise no_value(f"has {len(value)} entries: at most {MAX_TEMPLATE_KWARGS} are accepted")
    reserved = next((name for name in value if name in RESERVED_KWARGS), None)
    if reserved is not None:
        raise no_value(f"{reserved!r} has a field of its own or is the server's: leave it out")
    if not all(name.isidentifier() for name in value):
        raise no_value("names must be words of letters, digits and _, as a template uses them")
    try:
        size = len(json.dumps(value))
    except RecursionError as e:
        raise no_value("is nested too deeply") from e
    if size > MAX_TEMPLATE_KWARGS_CHARACTERS:
        raise no_value(
            f"has {size} characters as JSON: at most {MAX_TEMPLATE_KWARGS_CHARACTERS} are accepted"
        )
    return check_sendable(value)


class Conversation(Body):
    """Fields of a chat request beside those of every generation.

    thinking_token_budget:  most tokens of reasoning; the closing tag is then forced.  null = any
                            number.
    include_reasoning:      false = reasoning is left out of the answer, and still counted.
    continue_final_message: the answer goes on where the last message, of the assistant, ends.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        ToolChoice, PlainValidator(_tool_choice, json_schema_input_type=ToolChoice)
    ] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[
        Any,
        Only(None, [], fix="use tools: each function goes there as {type: function, function: it}"),
    ] = None
    function_call: Annotated[Any, Only(None, "none", "auto", fix="use tool_choice")] = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_bounded)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
