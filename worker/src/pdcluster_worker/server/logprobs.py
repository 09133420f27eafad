"""Log probabilities in the shapes of the two APIs.

A token that is no valid UTF-8 by itself (a part of a character) is shown as
OpenAI does: bytes:\\xe2\\x82.
"""

import math
from collections.abc import Sequence

from pdcluster_worker.engine.messages import Token
from pdcluster_worker.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from pdcluster_worker.server.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's value for "impossible": JSON has no -inf

Scored = Sequence[tuple[Token, int]]
"""Tokens with the offset, in characters, of each in its choice's text."""


def for_chat(scored: Scored, tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry for each token."""
    return ChatLogprobs(content=[_chat_entry(token, tokenizer) for token, _ in scored])


def for_completion(scored: Scored, tokenizer: Tokenizer) -> CompletionLogprobs:
    """Parallel lists; the chosen token is always among its position's top."""
    return CompletionLogprobs(
        tokens=[_shown(tokenizer.token_bytes(token.token_id)) for token, _ in scored],
        token_logprobs=[_finite(token.logprob) for token, _ in scored],
        top_logprobs=[_top_by_text(token, tokenizer) for token, _ in scored],
        text_offset=[offset for _, offset in scored],
    )


def _chat_entry(token: Token, tokenizer: Tokenizer) -> TokenLogprob:
    top = [_top(token_id, logprob, tokenizer) for token_id, logprob in token.top_logprobs]
    chosen = _top(token.token_id, token.logprob, tokenizer)
    return TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)


def _top(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(token=_shown(raw), logprob=_finite(logprob), bytes=list(raw))


def _top_by_text(token: Token, tokenizer: Tokenizer) -> dict[str, float]:
    entries = [*token.top_logprobs, (token.token_id, token.logprob)]
    return {_shown(tokenizer.token_bytes(token_id)): _finite(logprob) for token_id, logprob in entries}


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None or not math.isfinite(logprob) else max(logprob, _LEAST)
