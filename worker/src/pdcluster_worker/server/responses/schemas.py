"""Bodies of OpenAI's Responses API: null means the default, an undefined field is ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pdcluster_schema.text import quoted
from pdcluster_worker.server.http.json_body import Ignored
from pdcluster_worker.server.schemas.chat_fields import MAX_TOOLS, CallId, ReasoningEffort, ToolName
from pdcluster_worker.server.schemas.fields import (
    MAX_MESSAGES,
    Body,
    ImageUrl,
    Only,
    StopList,
    Text,
    TextOr,
    check_sendable,
    check_type,
    no_value,
    type_of,
)
from pdcluster_worker.server.schemas.requests import Logprobs, PositiveInt, Sampling

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_PARTS = 10_000
LOGPROBS = "message.output_text.logprobs"

_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class TextPart(Body):
    """A part of a message, of a tool's output or of reasoning: its text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


class RefusalPart(Body):
    """Refusal that an assistant gave in place of an answer."""

    type: Literal["refusal"]
    refusal: Text


class ImagePart(Body):
    """An image, for models that take them; detail is ignored."""

    type: Literal["input_image"]
    image_url: ImageUrl
    detail: Text | None = None
    file_id: Annotated[Any, Only(None, fix="send the image itself, as image_url")] = None


def _known_part(part: Any) -> Any:
    return check_type(part, _PARTS, "give text, in parts of type input_text")


def _known_shown_part(part: Any) -> Any:
    known = (*_PARTS, "input_image")
    return check_type(part, known, "give text or images, in parts of type input_text, input_image")


def _known_item(item: Any) -> Any:
    return check_type(item, _ITEMS, f"items of type {', '.join(_ITEMS)} are served")


def _part_tag(part: Any) -> str:
    kind = type_of(part)
    return f"<{kind}>" if kind in ("refusal", "input_image") else "<text>"


def _item_tag(item: Any) -> str:
    kind = type_of(item)
    return f"<{kind}>" if kind in _ITEMS else "<message>"  # a message may leave its type out


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(_part_tag),
    BeforeValidator(_known_part),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]
ShownPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<input_image>")],
    Discriminator(_part_tag),
    BeforeValidator(_known_shown_part),
]
ShownParts = Annotated[list[ShownPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(Body):
    """A message of the conversation, or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[ShownParts]
    id: Text | None = None


class FunctionCallItem(Body):
    """A call that the model made; arguments: JSON of an object, or as much of it as was made."""

    type: Literal["function_call"]
    call_id: CallId
    name: Text
    arguments: Text
    id: Text | None = None


class FunctionCallOutputItem(Body):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: TextOr[ShownParts]
    id: Text | None = None


class ReasoningItem(Body):
    """Thoughts of the model before an answer."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    id: Text | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_tag),
    BeforeValidator(_known_item),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ResponsesTool(Body):
    """A function that the model may call; tools that OpenAI runs are refused by their type."""

    type: Annotated[
        Any,
        Only(
            "function",
            fix="tools that a server runs, such as web_search, are not served: call functions",
        ),
    ]
    name: ToolName
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(check_sendable)] = None
    strict: bool | None = None


class NamedTool(Body):
    """The function that must be called."""

    type: Annotated[Any, Only("function", fix="give auto, none, required or a function")]
    name: ToolName


class TextFormat(Body):
    """The form of the answer's text; name, schema and strict are of json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema"), AfterValidator(check_sendable)
    ] = None
    strict: bool | None = None


class TextConfig(Body):
    """verbosity is ignored: the model writes as its prompt asks."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Ignored("the model writes as it is asked to in the prompt")] = None


class ReasoningConfig(Body):
    """summary is ignored: reasoning is shown as it is."""

    effort: ReasoningEffort | None = None
    summary: Annotated[Any, Ignored("reasoning is shown as it is")] = None
    generate_summary: Annotated[Any, Ignored("reasoning is shown as it is")] = None


def _checked_metadata(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise no_value(f"has {len(value)} entries: at most {MAX_METADATA} are accepted")
    return value


def _checked_includes(value: list[str] | None) -> list[str] | None:
    for name in value or ():
        if name not in _INCLUDES:
            raise no_value(f"{quoted(name)} is not supported here: {' and '.join(_INCLUDES)} are")
    return value


Metadata = Annotated[
    dict[
        Annotated[Text, Field(max_length=MAX_METADATA_KEY)],
        Annotated[Text, Field(max_length=MAX_METADATA_VALUE)],
    ],
    BeforeValidator(_checked_metadata),
]


class ResponsesStreamOptions(Body):
    """include_obfuscation is ignored: nothing is added to events."""

    include_obfuscation: Annotated[Any, Ignored("nothing is added to events")] = None


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses.

    store:                the response is kept, for GET and for previous_response_id; null = true.
    previous_response_id: a kept response, whose conversation this one goes on with; its
                          instructions do not count.
    truncation:           auto drops the oldest items of a conversation that is too long for the
                          model.
    include:              log probabilities of the text; encrypted reasoning is ignored: ours is not
                          encrypted.
    """

    model: Text
    input: TextOr[Items]
    instructions: Text | None = None
    previous_response_id: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: PositiveInt | None = None
    top_logprobs: Logprobs | None = None
    include: Annotated[list[Text] | None, AfterValidator(_checked_includes)] = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None

    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stop: StopList = None

    user: Annotated[Any, Ignored("clients are identified by their API keys")] = None
    safety_identifier: Annotated[Any, Ignored("clients are identified by their API keys")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see priority")] = None
    prompt_cache_key: Annotated[Any, Ignored("the prefix cache finds prompts by their tokens")] = (
        None
    )
    prompt_cache_retention: Annotated[
        Any, Ignored("the prefix cache finds prompts by their tokens")
    ] = None
    max_tool_calls: Annotated[Any, Ignored("it counts calls of tools that a server runs")] = None
    background: Annotated[
        Any, Only(None, False, fix="a response is made while its client waits")
    ] = None
    conversation: Annotated[
        Any, Only(None, fix="use previous_response_id, or send the whole conversation")
    ] = None
    prompt: Annotated[Any, Only(None, fix="send the prompt itself as instructions and input")] = (
        None
    )
    context_management: Annotated[Any, Only(None, [], fix="use truncation")] = None
