"""Bodies of Anthropic's Messages API: null means the default, an undefined field is ignored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from pdcluster_worker.server.http.json_body import Ignored
from pdcluster_worker.server.schemas.chat_fields import MAX_TOOLS, CallId, ToolName
from pdcluster_worker.server.schemas.fields import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    Body,
    ImageUrl,
    Only,
    StopString,
    Text,
    TextOr,
    check_sendable,
    check_type,
    type_of,
)
from pdcluster_worker.server.schemas.requests import PositiveInt, Sampling

MAX_BLOCKS = 10_000
LEAST_THINKING_TOKENS = 1024
"""Smallest budget of thinking; Anthropic's."""


class TextBlock(Body):
    """A text; citations and cache_control are ignored."""

    type: Literal["text"]
    text: Text


class Base64Source(Body):
    """An image's bytes."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text

    @property
    def image_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Body):
    """A URL that holds the image."""

    type: Literal["url"]
    url: ImageUrl

    @property
    def image_url(self) -> str:
        return self.url


_SOURCES = ("base64", "url")


def _known_source(source: Any) -> Any:
    return check_type(source, _SOURCES, "send the image itself, with a source of type base64")


class ImageBlock(Body):
    """An image, for models that take them."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(lambda source: "<url>" if type_of(source) == "url" else "<base64>"),
        BeforeValidator(_known_source),
    ]


class ThinkingBlock(Body):
    """Thoughts of the model before an earlier answer; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Thoughts from another server: shown to no model here."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call in the history."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


_SHOWN_KINDS = ("text", "image")


def _known_shown(block: Any) -> Any:
    return check_type(block, _SHOWN_KINDS, "give text, in blocks of type text, or images")


def _kind(block: Any) -> str:
    kind = type_of(block)
    return f"<{kind}>" if isinstance(kind, str) else "<text>"


ShownBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(_kind),
    BeforeValidator(_known_shown),
]
ShownBlocks = Annotated[list[ShownBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class ToolResultBlock(Body):
    """Result of a call; an error is shown to the model as one."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOr[ShownBlocks] | None = None
    is_error: bool | None = None


_KINDS = (*_SHOWN_KINDS, "thinking", "redacted_thinking", "tool_use", "tool_result")


def _known(block: Any) -> Any:
    return check_type(block, _KINDS, f"blocks of type {', '.join(_KINDS)} are served")


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_kind),
    BeforeValidator(_known),
]


Blocks = Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class InputMessage(Body):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Blocks]


class AnthropicTool(Body):
    """A tool of the client's; tools that Anthropic defines are refused by their type.

    input_schema: the JSON schema of its input.
    """

    type: Annotated[
        Any, Only(None, "custom", fix="give the tool a name and an input_schema of your own")
    ] = None
    name: ToolName
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_sendable)]
    strict: bool | None = None


class ToolChoice(Body):
    """Tools that are called.  name: of type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Switch for thinking before the answer, and its most tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=LEAST_THINKING_TOKENS)] | None = None


class OutputFormat(Body):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """effort is ignored: the model answers as its prompt asks."""

    format: OutputFormat | None = None
    effort: Annotated[Any, Ignored("the model writes as it is asked to in the prompt")] = None


class MessagesPrompt(Body):
    """Prompt that is counted, or that an answer is made from."""

    model: Text
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: TextOr[TextBlocks] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[Any, Only(None, [], fix="call tools from the client")] = None
    container: Annotated[Any, Only(None)] = None
    context_management: Annotated[Any, Ignored("a conversation is taken as it is sent")] = None


class MessagesRequest(Sampling, MessagesPrompt):
    """Body of POST /v1/messages."""

    max_tokens: PositiveInt
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = None
    metadata: Annotated[Any, Ignored("clients are identified by their API keys")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see priority")] = None
    inference_geo: Annotated[Any, Ignored("it runs where this server runs")] = None


class CountRequest(MessagesPrompt):
    """Body of POST /v1/messages/count_tokens."""
