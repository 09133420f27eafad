"""Whole answers of OpenAI's APIs as they are documented, and log probabilities in their shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pdcluster_worker.messages.requests import PromptLogprob, Token
from pdcluster_worker.server.generation.formatter import Json, Usage
from pdcluster_worker.server.text.events import AnswerReason
from pdcluster_worker.server.text.tokenizer import Tokenizer


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
"""Log probabilities by token id; null at the first position; left out if not asked for."""

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


_LEAST = -9999.0  # OpenAI's value for "impossible": JSON has no -inf

Scored = Sequence[tuple[Token, int]]
"""Tokens with the offset, in characters, of each in its choice's text."""
Row = tuple[str, float | None, dict[str, float] | None, int]
"""A position of `CompletionLogprobs`: token, its log probability, the most likely ones, offset."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens; as_ids: token_id:17, as vLLM does.  No valid UTF-8 is shown by its bytes."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def shown(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def entry(self, token_id: int, logprob: float | None) -> Json:
        """A `TopLogprob`."""
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": self.shown(token_id), "logprob": _finite(logprob), "bytes": list(raw)}


def chat_logprobs(scored: Scored, names: TokenNames) -> list[Json]:
    """Entries of a `TokenLogprob` each."""
    return [
        {
            **names.entry(token.token_id, token.logprob),
            "top_logprobs": [names.entry(*top) for top in token.top_logprobs],
        }
        for token, _ in scored
    ]


def completion_logprobs(rows: Sequence[Row]) -> Json:
    return {
        "tokens": [row[0] for row in rows],
        "token_logprobs": [row[1] for row in rows],
        "top_logprobs": [row[2] for row in rows],
        "text_offset": [row[3] for row in rows],
    }


def completion_rows(scored: Scored, names: TokenNames, shift: int) -> list[Row]:
    """The chosen token is among its position's top.  shift: characters before the choice's own."""
    return [
        _row(token.token_id, token.logprob, token.top_logprobs, shift + offset, names)
        for token, offset in scored
    ]


def echoed_rows(
    token_ids: Sequence[int],
    offsets: Sequence[int],
    figures: Sequence[PromptLogprob],
    count: int,
    names: TokenNames,
) -> list[Row]:
    """Rows of a prompt, whose first token has no figures.  count: top tokens of each."""
    rows: list[Row] = [(names.shown(token_ids[0]), None, None, offsets[0])]
    for token_id, one, offset in zip(token_ids[1:], figures, offsets[1:], strict=True):
        rows.append(_row(token_id, one.logprob, one.top_logprobs[:count], offset, names))
    return rows


def _row(
    token_id: int,
    logprob: float | None,
    top: Sequence[tuple[int, float]],
    offset: int,
    names: TokenNames,
) -> Row:
    likely = {names.shown(entry): _finite(value) for entry, value in [*top, (token_id, logprob)]}
    return names.shown(token_id), _finite(logprob), likely, offset


def prompt_logprobs(
    token_ids: Sequence[int], figures: Sequence[PromptLogprob], count: int, names: TokenNames
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own first; none of its first one."""
    positions: list[Json | None] = [None]
    for token_id, one in zip(token_ids[1:], figures, strict=True):
        top = [(other, logprob, rank) for rank, (other, logprob) in enumerate(one.top_logprobs, 1)]
        shown = [(token_id, one.logprob, one.rank), *(e for e in top[:count] if e[0] != token_id)]
        positions.append(
            {
                str(entry): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": names.shown(entry),
                }
                for entry, logprob, rank in shown
            }
        )
    return positions


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None or not math.isfinite(logprob) else max(logprob, _LEAST)
