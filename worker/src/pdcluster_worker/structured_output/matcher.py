"""Position of one answer in its grammar: fed its tokens, it returns those that may come next.

A follower goes by the output alone: it catches up with whatever tokens a request
has, made here or elsewhere, once or again after a preemption or a move, and it
can look ahead along tokens that are only guessed and come back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.engine.request import EngineRequest

MOST_SECONDS = 2.0
"""Most core seconds of an answer, beside those of each token."""

SECONDS_PER_TOKEN = 0.1
"""Core seconds per token; most grammars take less than a thousandth of a second, long repetitions
of characters up to 0.07.
"""

MOST_AT_ONCE = 0.2
"""Seconds of a core for one token; a grammar that can be read in many ways takes more with each."""

_ALL = np.int32(-1)  # a word of a mask that lets all its tokens pass


class OutsideError(Exception):
    """Tokens that the grammar does not have; nothing that was sampled under it is so."""


class SlowError(Exception):
    """A grammar takes too long to follow; all other requests of a step wait for it."""


class Matcher:
    """One request's.  matcher: xgrammar's, at the beginning."""

    def __init__(self, matcher: Any) -> None:
        self._seconds = 0.0
        self._matcher = matcher
        self._fed: list[int] = []

    @property
    def num_fed(self) -> int:
        """Output tokens that it has been fed."""
        return len(self._fed)

    def new_tokens(self, request: EngineRequest) -> list[int]:
        """The tokens of its output that it has not been fed; all of them where it was fed others,
        and it begins again.
        """
        num_fed, first = len(self._fed), request.num_prompt_tokens
        if num_fed > request.num_output_tokens or (
            num_fed and request.tokens[first + num_fed - 1] != self._fed[-1]
        ):
            self._matcher.reset()
            self._fed.clear()
            num_fed = 0
        return request.tokens[first + num_fed :]

    def feed(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that the answer has.  Raises OutsideError."""
        for token_id in token_ids:
            self._fed.append(token_id)
            if not self._matcher.is_terminated() and not self._matcher.accept_token(
                token_id, False
            ):
                raise OutsideError(
                    f"token {token_id} at place {len(self._fed) - 1} of the output is not in the "
                    "grammar"
                )

    def fill(self, words: NDArray[np.int32], guessed: Sequence[int] = ()) -> bool:
        """Fill in the tokens that may follow what was fed and these guessed ones; return whether
        any are barred.

        words: a bit for each token, the first in the lowest; filled where this returns True.
        Guessed tokens that the grammar does not have, or that come after its end, bar nothing: what
        follows them counts for nothing.
        """
        if self._matcher.is_terminated():
            return False
        num_taken = 0
        try:
            for token_id in guessed:
                if self._matcher.is_terminated() or not self._matcher.accept_token(token_id, False):
                    return False
                num_taken += 1
            if self._matcher.is_terminated():
                return False
            words.fill(_ALL)
            return bool(self._matcher.fill_next_token_bitmask(words[None, :], 0, False))
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)

    def spend(self, seconds: float, at_once: float) -> None:
        """Add the time that following took just now, in all and for one token.

        Raises SlowError once it is too long.
        """
        self._seconds += seconds
        if at_once > MOST_AT_ONCE or self._seconds > MOST_SECONDS + SECONDS_PER_TOKEN * len(
            self._fed
        ):
            raise SlowError(
                f"takes too long to follow, {self._seconds:.1f} s up to token {len(self._fed)}: "
                "make it simpler, with fewer repetitions in one another and fewer ways to read one "
                "text"
            )

    def count_fitting(self, guessed: Sequence[int]) -> int:
        """Count how many of these guessed tokens the grammar takes, one after another; changes
        nothing.
        """
        num_taken = 0
        for token_id in guessed:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id, False):
                break
            num_taken += 1
        if num_taken:
            self._matcher.rollback(num_taken)
        return num_taken
