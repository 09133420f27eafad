"""Log probabilities in the shapes of the APIs.  A token that is no valid UTF-8 by itself is shown
as OpenAI does, by its bytes in hexadecimal, or every token by its id, as vLLM does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_worker.messages.requests import PromptLogprob, Token
from pdcluster_worker.server.openai.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)
from pdcluster_worker.server.text.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's value for "impossible": JSON has no -inf

Scored = Sequence[tuple[Token, int]]
"""Tokens with the offset, in characters, of each in its choice's text."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in an answer.  as_ids: token_id:17."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def shown(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)


def for_chat(scored: Scored, names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_entry(token, names) for token, _ in scored])


def for_completion(scored: Scored, names: TokenNames, shift: int = 0) -> CompletionLogprobs:
    """Parallel lists; the chosen token is always among its position's top.  shift: characters
    before the choice's own.
    """
    return CompletionLogprobs(
        tokens=[names.shown(token.token_id) for token, _ in scored],
        token_logprobs=[_finite(token.logprob) for token, _ in scored],
        top_logprobs=[
            _top_by_name(token.token_id, token.logprob, token.top_logprobs, names)
            for token, _ in scored
        ],
        text_offset=[shift + offset for _, offset in scored],
    )


def echoed(
    token_ids: Sequence[int],
    offsets: Sequence[int],
    figures: Sequence[PromptLogprob],
    count: int,
    names: TokenNames,
) -> CompletionLogprobs:
    """The same for a prompt, whose first token has none; figures: of the others.  count: most
    likely tokens of each.
    """
    rated = list(zip(token_ids[1:], figures, strict=True))
    return CompletionLogprobs(
        tokens=[names.shown(token_id) for token_id in token_ids],
        token_logprobs=[None, *(_finite(one.logprob) for _, one in rated)],
        top_logprobs=[
            None,
            *(
                _top_by_name(token_id, one.logprob, one.top_logprobs[:count], names)
                for token_id, one in rated
            ),
        ],
        text_offset=list(offsets),
    )


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def for_prompt(
    token_ids: Sequence[int], figures: Sequence[PromptLogprob], count: int, names: TokenNames
) -> list[dict[str, PromptTokenLogprob] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; none of
    its first one.
    """
    return [
        None,
        *(
            _ranked(token_id, one, count, names)
            for token_id, one in zip(token_ids[1:], figures, strict=True)
        ),
    ]


def _ranked(
    token_id: int, one: PromptLogprob, count: int, names: TokenNames
) -> dict[str, PromptTokenLogprob]:
    top = [
        (other, logprob, rank)
        for rank, (other, logprob) in enumerate(one.top_logprobs[:count], start=1)
    ]
    entries = [(token_id, one.logprob, one.rank), *(entry for entry in top if entry[0] != token_id)]
    return {
        str(entry): PromptTokenLogprob(
            logprob=_finite(logprob), rank=rank, decoded_token=names.shown(entry)
        )
        for entry, logprob, rank in entries
    }


def _chat_entry(token: Token, names: TokenNames) -> TokenLogprob:
    top = [_top(token_id, logprob, names) for token_id, logprob in token.top_logprobs]
    chosen = _top(token.token_id, token.logprob, names)
    return TokenLogprob(
        token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
    )


def _top(token_id: int, logprob: float | None, names: TokenNames) -> TopLogprob:
    return TopLogprob(
        token=names.shown(token_id), logprob=_finite(logprob), bytes=list(names.raw(token_id))
    )


def _top_by_name(
    token_id: int, logprob: float | None, top: Sequence[tuple[int, float]], names: TokenNames
) -> dict[str, float]:
    return {names.shown(entry): _finite(value) for entry, value in [*top, (token_id, logprob)]}


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None or not math.isfinite(logprob) else max(logprob, _LEAST)
