"""One choice of a request: its tokens in, its text out, until a stop string or the engine ends it.

Holds what has to be remembered between two tokens; HTTP, JSON and clocks are elsewhere.
"""

from dataclasses import dataclass

import msgspec

from pdcluster_worker.engine.messages import FinishReason, Token
from pdcluster_worker.server.detokenizer import Detokenizer
from pdcluster_worker.server.replies import Served
from pdcluster_worker.server.stop_strings import StopStrings
from pdcluster_worker.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of the generated text the client wants to see.

    stop:         stop strings; they count in the text after the first `min_tokens` tokens.
    include_stop: keep the stop string, or the token that ended the choice, in the text.
    skip_special: control tokens give no text.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    """What one token adds to one choice.

    index:         of the choice, over all prompts.
    degraded:      what the choice lost under load, on its first.
    scored:        the token and its offset in the text, when log probabilities were asked for.
    is_first:      whether it is the choice's first.
    finish_reason: set on the last one.
    """

    index: int
    text: str
    scored: tuple[tuple[Token, int], ...] = ()
    is_first: bool = False
    finish_reason: FinishReason | None = None
    degraded: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is text and nothing else."""
        return bool(self.text) and not (self.is_first or self.scored or self.finish_reason)


def finish_reason_of(deltas: list[Delta]) -> FinishReason:
    """Of a choice that has ended: its last delta says it."""
    reason = deltas[-1].finish_reason
    assert reason is not None, "a generation yields until every choice has ended"
    return reason


def served(deltas: list[Delta]) -> Served | None:
    """Our own part of an answer with these deltas: what each choice lost, once."""
    lost = dict.fromkeys(what for delta in deltas for what in delta.degraded)
    return Served(degraded=list(lost)) if lost else None


class Choice:
    """Counts and decodes the tokens of one choice."""

    def __init__(self, index: int, tokenizer: Tokenizer, rules: TextRules) -> None:
        self.index = index
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._detokenizer = Detokenizer()
        self._stops = StopStrings(rules.stop, include=rules.include_stop)
        self._offset = 0  # characters decoded so far, those held back included

    def feed(self, token: Token) -> Delta:
        """Take the next token; `finish_reason` is set when it was the last."""
        is_first = self.num_tokens == 0
        if is_first:
            self.cached_tokens = token.cached_tokens
        self.num_tokens += 1
        scored = () if token.logprob is None else ((token, self._offset),)
        decoded = self._decode(token)
        self._offset += len(decoded)
        text, stopped = self._visible(decoded)
        self.finish_reason = "stop" if stopped else token.finish_reason
        if self.finish_reason and not stopped:
            text += self._stops.flush()
        return Delta(self.index, text, scored, is_first, self.finish_reason)

    def _decode(self, token: Token) -> str:
        text = "" if self._is_hidden(token) else self._detokenizer.feed(self._tokenizer.piece(token.token_id))
        return text + self._detokenizer.flush() if token.finish_reason else text

    def _is_hidden(self, token: Token) -> bool:
        if token.finish_reason == "stop" and not self._rules.include_stop:
            return True  # the engine ended it by this token: eos or a stop token id
        return self._rules.skip_special and self._tokenizer.is_special(token.token_id)

    def _visible(self, decoded: str) -> tuple[str, bool]:
        if self.num_tokens <= self._rules.min_tokens:
            return decoded, False
        return self._stops.feed(decoded)
