"""The answers of OpenAI's APIs: null is written, but left out of a chunk's delta.  Chunks carry
`usage` only when the client wants it, hence a class with and one without.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pdcluster_worker.server.generation.formatter import Usage
from pdcluster_worker.server.text.events import AnswerReason, Delta


def _is_none(value: object) -> bool:
    return value is None


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token at a position, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of the tokens of one choice, or of one chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists; text_offset counts characters from the start of the choice's text.

    Of an echo, the prompt's first token has no log probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(BaseModel):
    """One token at a position of a prompt.  rank: 1 = the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptTokenLogprob] | None] | None, Field(exclude_if=_is_none)
]
"""Log probabilities by token id; null at the first position; left out where they were not asked
for.
"""

ShownTokenIds = Annotated[list[int] | None, Field(exclude_if=_is_none)]
"""Left out where they were not asked for."""


class CalledFunction(BaseModel):
    """A function's name and arguments; these are JSON text."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """One call of a tool, whole."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """A whole answer; content is null where it is calls of tools alone.

    reasoning, reasoning_content: what came before it, left out where there is none; the second is
                                  the older name.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: Annotated[str | None, Field(exclude_if=_is_none)] = None
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    tool_calls: Annotated[list[CalledTool] | None, Field(exclude_if=_is_none)] = None


class ChatChoice(BaseModel):
    """One whole choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerReason
    token_ids: ShownTokenIds = None


class ServedExtension(BaseModel):
    """Our own part of an answer.  degraded: what the request lost under load, such as
    max_tokens=200.
    """

    degraded: list[str]


ServedPart = Annotated[ServedExtension | None, Field(exclude_if=_is_none)]
"""Left out where there is nothing to say."""


class ChatReply(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    pdcluster: ServedPart = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: ShownTokenIds = None


class FunctionDelta(BaseModel):
    """The name comes in a call's first chunk, the arguments in pieces."""

    name: Annotated[str | None, Field(exclude_if=_is_none)] = None
    arguments: str = ""


class ToolCallDelta(BaseModel):
    """Addition of a chunk to the call `index`; id and type come in its first."""

    index: int
    id: Annotated[str | None, Field(exclude_if=_is_none)] = None
    type: Annotated[Literal["function"] | None, Field(exclude_if=_is_none)] = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """Addition of a chunk to the answer."""

    role: Annotated[Literal["assistant"] | None, Field(exclude_if=_is_none)] = None
    content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    reasoning: Annotated[str | None, Field(exclude_if=_is_none)] = None
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, Field(exclude_if=_is_none)] = None


class ChatChunkChoice(BaseModel):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerReason | None
    token_ids: ShownTokenIds = None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    pdcluster: ServedPart = None
    prompt_token_ids: ShownTokenIds = None


class ChatUsageChunk(ChatChunk):
    """With include_usage: usage is null but in the last chunk, which has no choices, and in all of
    them with continuous_usage_stats.
    """

    usage: Usage | None


class CompletionChoice(BaseModel):
    """One whole choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerReason
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: ShownTokenIds = None
    token_ids: ShownTokenIds = None


class CompletionReply(BaseModel):
    """A text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    pdcluster: ServedPart = None


class CompletionChunkChoice(BaseModel):
    """One choice's part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerReason | None
    prompt_token_ids: ShownTokenIds = None
    token_ids: ShownTokenIds = None


class CompletionChunk(BaseModel):
    """One event of a streamed text completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    pdcluster: ServedPart = None


class CompletionUsageChunk(CompletionChunk):
    """With include_usage: usage is null but in the last chunk, which has no choices, and in all of
    them with continuous_usage_stats.
    """

    usage: Usage | None


class ModelCard(BaseModel):
    """A model that this worker serves; max_model_len: in tokens, left out until the engine is
    ready.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdcluster"
    max_model_len: int | None


class ModelList(BaseModel):
    """All of them: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthState(BaseModel):
    """Answer of /health and /ready; reason: null when all is well."""

    status: Literal["ok", "unavailable"]
    reason: str | None


class DeviceState(BaseModel):
    """Device that the engine computes on.

    kind: cpu or cuda, and of a stock engine also rocm, tpu, xpu or unknown; name: of the processor
          or the accelerator.
    operations: what the model is computed by ("reference": plain torch, without compiled kernels).
    model_code: whose code computes the layers, decoder (ours) or transformers.
    tensor_parallel_size, pipeline_parallel_size: its ranks are their product.
    note: what a user must know of computing on it, such as why operations is reference, and the
          fix; left out where there is nothing.
    """

    kind: str
    name: str
    operations: str = ""
    model_code: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    note: str = ""


class VersionReply(BaseModel):
    """Answer of /version.  device and scheduler: null until the engine has loaded.

    max_model_len: most tokens of one request, prompt and output; left out until the engine has
                   loaded.
    note: why that is lower than the model's own length; left out where it is not, or was asked for.
    """

    version: str
    device: DeviceState | None
    scheduler: str | None
    max_model_len: int | None = None
    note: str = ""


def served(deltas: list[Delta]) -> ServedExtension | None:
    """Our own part of an answer with these deltas: what each choice lost, once."""
    lost = dict.fromkeys(what for delta in deltas for what in delta.degraded)
    return ServedExtension(degraded=list(lost)) if lost else None
