"""Log probabilities in the shapes of the APIs.  A token that is no valid UTF-8 by itself is shown
as OpenAI does, by its bytes in hexadecimal, or every token by its id, as vLLM does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_worker.messages.requests import PromptLogprob, Token
from pdcluster_worker.server.text.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's value for "impossible": JSON has no -inf

Json = dict[str, Any]
Scored = Sequence[tuple[Token, int]]
"""Tokens with the offset, in characters, of each in its choice's text."""
Row = tuple[str, float | None, dict[str, float] | None, int]
"""A position of `CompletionLogprobs`: token, its log probability, the most likely ones, offset."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in an answer.  as_ids: token_id:17."""

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


def for_chat(scored: Scored, names: TokenNames) -> list[Json]:
    """Entries of a `TokenLogprob` each."""
    return [
        {
            **names.entry(token.token_id, token.logprob),
            "top_logprobs": [names.entry(*top) for top in token.top_logprobs],
        }
        for token, _ in scored
    ]


def for_completion(rows: Sequence[Row]) -> Json:
    return {
        "tokens": [row[0] for row in rows],
        "token_logprobs": [row[1] for row in rows],
        "top_logprobs": [row[2] for row in rows],
        "text_offset": [row[3] for row in rows],
    }


def completion_rows(scored: Scored, names: TokenNames, shift: int) -> list[Row]:
    """The chosen token is always among its position's top.  shift: characters before the choice's
    own.
    """
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
    """The same for a prompt, whose first token has none; figures: of the others.  count: most
    likely tokens of each.
    """
    first: Row = (names.shown(token_ids[0]), None, None, offsets[0])
    others = zip(token_ids[1:], figures, offsets[1:], strict=True)
    return [
        first,
        *(
            _row(token_id, one.logprob, one.top_logprobs[:count], offset, names)
            for token_id, one, offset in others
        ),
    ]


def _row(
    token_id: int,
    logprob: float | None,
    top: Sequence[tuple[int, float]],
    offset: int,
    names: TokenNames,
) -> Row:
    likely = {names.shown(entry): _finite(value) for entry, value in [*top, (token_id, logprob)]}
    return names.shown(token_id), _finite(logprob), likely, offset


def for_prompt(
    token_ids: Sequence[int], figures: Sequence[PromptLogprob], count: int, names: TokenNames
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; none of
    its first one.
    """
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
