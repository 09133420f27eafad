"""Position of one answer in its grammar: fed its tokens, it returns those that may come next.

It goes by the output alone: it catches up with whatever tokens a request has, made here or
elsewhere, once or again after a preemption or a migration, and looks ahead along drafts on a copy.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.structured_output.compiler import CompiledForm, explain

MAX_SECONDS = 2.0
"""Most core seconds of an answer, beside those of each token."""

SECONDS_PER_TOKEN = 0.1
"""Core seconds per token; most grammars take less than a thousandth of a second."""

MAX_STEP_SECONDS = 0.2
"""Core seconds for one token; a grammar that can be read in many ways takes more with each."""

MAX_RENEWAL_SECONDS = 0.05
"""Core seconds of a compile that a step waits for; a schema of 500 properties takes 0.02."""


_LEXER_ERROR = "lexer error"


class OutsideError(Exception):
    """Tokens that the grammar does not have; nothing that was sampled under it is so."""


class SlowError(Exception):
    """A grammar takes too long to follow; all other requests of a step wait for it."""


class Matcher:
    """One request's.  ends: the tokens that end its answer."""

    def __init__(self, form: CompiledForm, ends: Sequence[int]) -> None:
        self.form = form
        self._is_renewed = False
        self._is_catching_up = False
        self._ends = frozenset(ends)
        self._seconds = 0.0
        self._matcher = form.matcher.deep_copy()
        self._fed: list[int] = []
        self._is_ended = False

    def new_tokens(self, request: EngineRequest) -> list[int]:
        """The output that it has not been fed; all where it was fed another, and begins again."""
        num_fed, first = len(self._fed), request.num_prompt_tokens
        if num_fed > request.num_output_tokens or (
            num_fed and request.tokens[first + num_fed - 1] != self._fed[-1]
        ):
            self._restart()
            num_fed = 0
        return request.tokens[first + num_fed :]

    def feed(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that the answer has.  Raises OutsideError, SlowError."""
        for token_id in token_ids:
            self._fed.append(token_id)
            if self._is_ended:
                continue
            if not self._take(self._matcher, token_id):
                if self._has_failed(self._matcher):
                    self._renew(self._matcher)  # which feeds it this token too
                    continue
                raise OutsideError(
                    f"token {token_id} at place {len(self._fed) - 1} of the output is not in the "
                    "grammar"
                )
            self._is_ended = token_id in self._ends

    def fill(self, words: NDArray[np.uint32], drafts: Sequence[int] = ()) -> bool:
        """Fill in the tokens that may follow what was fed and these drafts; True if any are barred.

        words: a bit for each token and one more, the first in the lowest.  Drafts outside the
        grammar, or after its end, bar nothing: what follows is discarded.  Raises SlowError.
        """
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        if self._is_ended:
            return False
        is_fitting = self._num_taken(matcher, drafts) == len(drafts)
        if is_fitting and self._ends.isdisjoint(drafts):
            fill_next_token_bitmask(matcher, words[None, :].view(np.int32))
        elif not self._has_failed(matcher):
            return False
        if self._has_failed(matcher):
            self._renew(matcher)
            return self.fill(words, drafts)
        if self.form.budget is not None:
            self.form.budget.bar(words, [*self._fed, *drafts])
        is_accepting = matcher.is_accepting()
        for token_id in self._ends:  # a form of any tokens has them too
            bit = np.uint32(1 << (token_id & 31))
            words[token_id >> 5] &= ~bit
            words[token_id >> 5] |= bit * is_accepting
        return True

    def spend(self, seconds: float, step_seconds: float) -> None:
        """Add the time that following took just now, in all and for one token: or SlowError."""
        self._seconds += seconds
        is_slow = step_seconds > MAX_STEP_SECONDS and not self._is_catching_up
        self._is_catching_up = False
        if is_slow or self._seconds > MAX_SECONDS + SECONDS_PER_TOKEN * len(self._fed):
            raise SlowError(
                f"takes too long to follow, {self._seconds:.1f} s up to token {len(self._fed)}: "
                f"{_SIMPLER}"
            )

    def _restart(self) -> None:
        self._matcher = self.form.matcher.deep_copy()
        self._fed = []
        self._is_ended = False

    def _num_taken(self, matcher: LLMatcher, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if not self._take(matcher, token_id):
                return index
            if token_id in self._ends:
                return index + 1
        return len(token_ids)

    def _take(self, matcher: LLMatcher, token_id: int) -> bool:
        if token_id in self._ends:
            return bool(matcher.is_accepting())
        return matcher.try_consume_tokens([token_id]) == 1

    def _has_failed(self, matcher: LLMatcher) -> bool:
        """Once the lexer that a form's requests share is used up, no answer of theirs holds."""
        if _LEXER_ERROR in matcher.get_error():
            self.form.is_spent.set()
        return self.form.is_spent.is_set() or matcher.is_error()

    def _renew(self, matcher: LLMatcher) -> None:
        """Go on with a lexer of its own, once; raises SlowError where that is of no use."""
        is_slow = self.form.seconds > MAX_RENEWAL_SECONDS
        if self._is_renewed or is_slow or not self.form.is_spent.is_set():
            reason = explain(matcher.get_error()) or "too many states"
            raise SlowError(f"takes too much work to follow ({reason}): {_SIMPLER}")
        self._is_renewed = self._is_catching_up = True
        self.form = replace(self.form, matcher=self.form.compile_matcher(), is_spent=Event())
        fed = self._fed
        self._restart()
        self.feed(fed)


_SIMPLER = "make it simpler, with fewer repetitions in one another and fewer ways to read one text"
