"""Counters of one worker's requests, for any engine: waits of prompts and the pace of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

REFRESH_SECONDS = 1.0


@dataclass(slots=True)
class Measured:
    elapsed_seconds: float = 0.0
    busy_seconds: float = 0.0  # with any request
    waiting_seconds: float = 0.0  # with a request that waits for its first token
    prompt_tokens: int = 0  # of requests that got their first token
    first_tokens: int = 0
    stream_seconds: float = 0.0  # of each stream past its first token, summed
    decoding_seconds: float = 0.0  # with at least one stream
    tokens: int = 0  # after the first ones
    ended: int = 0


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_waiting = 0
        self.num_streams = 0
        self._clock = clock
        self._settled = clock()
        self._sums = Measured()

    def joined(self) -> None:
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
        self._sums.tokens += 1

    def left(self, *, has_started: bool) -> None:
        self._settle()
        self._sums.ended += 1
        if has_started:
            self.num_streams -= 1
        else:
            self.num_waiting -= 1

    def take(self) -> Measured | None:
        """Sums since the last call; None while that is less than REFRESH_SECONDS ago."""
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
