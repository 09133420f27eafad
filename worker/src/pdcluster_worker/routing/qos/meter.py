"""Measure the requests of one worker, of any engine: waits of prompts, and the pace of tokens.

Called at each change; `take` gives the sums of about a second at a
time.  `clock` gives monotonic seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

REFRESH_SECONDS = 1.0
"""Period of updates of the averages."""


@dataclass(slots=True)
class Measured:
    """Sums over a stretch of time.

    elapsed_seconds: of it; busy_seconds: with any request.
    waiting_seconds: with a request that waited for its first token.
    prompt_tokens:   of the requests that got theirs; first_tokens: how many did.
    stream_seconds:  that streams were past their first token, each counted; decoding_seconds: with
                     one at least.
    tokens:          after the first ones.
    ended:           requests that left, for whatever reason.
    """

    elapsed_seconds: float = 0.0
    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    prompt_tokens: int = 0
    first_tokens: int = 0
    stream_seconds: float = 0.0
    decoding_seconds: float = 0.0
    tokens: int = 0
    ended: int = 0


class Meter:
    """Counts of the requests of one worker, and what passes meanwhile."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_waiting = 0
        self.num_streams = 0
        self._clock = clock
        self._settled = clock()
        self._sums = Measured()

    def joined(self) -> None:
        """A request waits for its first token from now on."""
        self._settle()
        self.num_waiting += 1

    def started(self, prompt_tokens: int) -> None:
        """A waiting request has its first token."""
        self._settle()
        self.num_waiting -= 1
        self.num_streams += 1
        self._sums.prompt_tokens += prompt_tokens
        self._sums.first_tokens += 1

    def token(self) -> None:
        """A stream has made one more."""
        self._sums.tokens += 1

    def left(self, *, has_started: bool) -> None:
        """A request is over, or given up."""
        self._settle()
        self._sums.ended += 1
        if has_started:
            self.num_streams -= 1
        else:
            self.num_waiting -= 1

    def take(self) -> Measured | None:
        """Sums since the last time; None while that is less than REFRESH_SECONDS ago."""
        self._settle()
        if self._sums.elapsed_seconds < REFRESH_SECONDS:
            return None
        sums, self._sums = self._sums, Measured()
        return sums

    def _settle(self) -> None:
        now = self._clock()
        passed, self._settled = now - self._settled, now
        self._sums.elapsed_seconds += passed
        self._sums.busy_seconds += passed * (self.num_waiting + self.num_streams > 0)
        self._sums.stream_seconds += passed * self.num_streams
        self._sums.waiting_seconds += passed * (self.num_waiting > 0)
        self._sums.decoding_seconds += passed * (self.num_streams > 0)
