"""Fields of a chat request: messages, tools, and how the model's template is used.  Types and sizes
are checked here, what fields mean together in `conversation` and `tool_choice`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError

from pdcluster_worker.server.schemas.fields import (
    MAX_MESSAGES,
    Body,
    Only,
    Text,
    check_sendable,
    join_parts,
    no_value,
)
from pdcluster_worker.server.tools.schema_check import check_parameters

MAX_TOOLS = 128
"""OpenAI's."""
MAX_TOOL_NAME = 128
MAX_CALLS = 128
MAX_ID_CHARACTERS = 256
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_CHARACTERS = 16_384

RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
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
    Text | None,
    BeforeValidator(join_parts, json_schema_input_type=str | list[dict[str, str]] | None),
]


class Message(Body):
    """One message; `name` is ignored, `developer` is shown to the model as `system`.

    content:      null only of role assistant.
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
