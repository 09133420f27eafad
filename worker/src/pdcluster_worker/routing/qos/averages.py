"""Estimates from moving averages of one worker's requests, for any engine."""

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.routing.waiting_time.rates import StepTime
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    QueuedRequest,
    QueueState,
)

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
    """Counters of one worker's requests: waits of prompts and the pace of tokens."""

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


KEPT = 0.8  # of the weight, for each second that passes: half after three

LEAST_KEPT = 1e-6  # after a pause the next measurement counts nearly alone

MIN_TOKENS = 2  # fewer tokens in a second say too little


def queue_seconds(
    prefill_q: float, avg_prefill: float, decode_q: float, avg_decode: float
) -> float:
    """The estimated time to the first token.

    prefill_q, decode_q:     requests ahead, to prefill and decoding.
    avg_prefill, avg_decode: seconds of each.

    >>> queue_seconds(3, 0.1, 4, 0.05)
    0.5
    """
    return prefill_q * avg_prefill + decode_q * avg_decode


class Averages:
    """An `Estimator` by moving averages; also the pace of the queue."""

    def __init__(self) -> None:
        self._waiting = self._prompt_tokens = 0.0  # fading sums
        self._firsts = self._ended = self._busy = 0.0
        self._step = StepTime(None, min_samples=1)

    def refresh(self, measured: Measured) -> None:
        kept = max(LEAST_KEPT, KEPT**measured.elapsed_seconds)
        self._waiting = kept * self._waiting + measured.waiting_seconds
        self._prompt_tokens = kept * self._prompt_tokens + measured.prompt_tokens
        self._firsts = kept * self._firsts + measured.first_tokens
        self._ended = kept * self._ended + measured.ended
        self._busy = kept * self._busy + measured.busy_seconds
        if measured.tokens >= MIN_TOKENS and measured.decoding_seconds:
            batch = measured.stream_seconds / measured.decoding_seconds
            self._step.observe(measured.stream_seconds, measured.tokens + 1, batch)

    def observe(self, completion: Completion) -> None:
        """Nothing: the averages come from `refresh`, which also counts unfinished requests."""

    @property
    def prompt_token_seconds(self) -> float | None:
        """Seconds of waiting for each prompt token ahead; None = not measured."""
        return self._waiting / self._prompt_tokens if self._prompt_tokens else None

    def estimated_tpot_seconds(self, num_streams: int) -> float | None:
        """Seconds between two tokens of a stream."""
        return self._step.seconds(num_streams) if num_streams else None

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """Each request ahead times its own prompt tokens, and one decode step of the streams."""
        token_seconds = self.prompt_token_seconds
        if token_seconds is None:
            return None
        requests = queue.requests
        ahead, streams = requests.ahead(request), len(requests.running)
        step = self.estimated_tpot_seconds(streams) or 0.0
        avg_prefill = (
            ahead.prompt_tokens / ahead.num_requests * token_seconds if ahead.num_requests else 0.0
        )
        return queue_seconds(ahead.num_requests, avg_prefill, streams, step / max(1, streams))

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """With the longest answer that it may give."""
        first = self.estimated_ttft_seconds(request, queue)
        step = self.estimated_tpot_seconds(len(queue.requests.running) + 1)
        return None if first is None or step is None else first + (request.max_tokens - 1) * step

    @property
    def firsts_per_second(self) -> float:
        """Recent first tokens a second, while any request waited; 0 = none."""
        return self._firsts / self._waiting if self._waiting else 0.0

    @property
    def ends_per_second(self) -> float:
        """Recently ended requests a second, while there were any; 0 = none."""
        return self._ended / self._busy if self._busy else 0.0
