"""Estimator `loadAware`: simulates the queue with measured lengths (docs/waiting-time.md)."""

from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from statistics import median

from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.routing.waiting_time.lengths import (
    Survival,
    shared_weight,
    simulate_behind,
    simulate_queue,
)
from pdcluster_worker.routing.waiting_time.rates import LruDict, PrefillRate, Presets, StepTime
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    Estimator,
    GroupSeconds,
    QueueAhead,
    QueuedRequest,
    QueueState,
)
from pdcluster_worker.routing.waiting_time.rwt import MAX_GROUPS, MIN_SAMPLES, RwtEstimator

WINDOW = 200  # latest lengths kept of a group, and of all groups together

MAX_DRAWS, DRAWN_LENGTHS = 32, 1024  # of a group: a forecast takes about a millisecond

_NewCompletions = tuple[int, int, int, int]  # changes when a cached distribution is old

_GOLDEN = 0.6180339887498949  # ranks of neighbours are as far apart as can be


class LoadAware:
    def __init__(self, presets: Presets) -> None:
        self._preset_tokens = presets.output_tokens
        self._step = StepTime(presets.token_seconds, MIN_SAMPLES)
        self._prefill = PrefillRate(presets.prefill_tokens_per_second)
        self._lengths: LruDict[deque[int]] = LruDict(MAX_GROUPS)
        self._pool: deque[int] = deque(maxlen=WINDOW)
        self._num_seen = 0
        self._weight: tuple[int, float] | None = None
        self._num_own: LruDict[int] = LruDict(MAX_GROUPS)
        self._kept: LruDict[tuple[_NewCompletions, Survival] | None] = LruDict(MAX_GROUPS)

    def observe(self, completion: Completion) -> None:
        """Short answers count too: they are part of the distribution."""
        self._prefill.observe(completion.prompt_tokens, completion.prefill_seconds)
        seconds = completion.decode_seconds
        if seconds is not None:
            self._step.observe(seconds, completion.output_tokens, completion.batch)
        lengths = self._lengths.get(completion.group, deque(maxlen=WINDOW))
        lengths.append(completion.output_tokens)
        self._lengths.put(completion.group, lengths)
        self._pool.append(completion.output_tokens)
        self._num_seen += 1
        self._num_own.put(completion.group, self._num_own.get(completion.group, 0) + 1)

    def survival(self, group: str, going: Sequence[int] = ()) -> Survival:
        """going: tokens of the answers that are not complete."""
        own = self._lengths.get(group, deque())
        completed = [(tokens, 1.0) for tokens in own]
        if self._pool:
            share = self._shared_weight() / len(self._pool)
            completed += [(tokens, share) for tokens in self._pool]
        if len(self._pool) < MIN_SAMPLES:
            completed.append((round(self._preset_tokens), float(MIN_SAMPLES - len(self._pool))))
        return Survival.of(completed, [(tokens, 1.0) for tokens in going])

    def _shared_weight(self) -> float:
        """Recomputed when a tenth of the completions is new."""
        news = _steps(self._num_seen, 10)
        if self._weight is None or self._weight[0] != news:
            groups = [self._lengths.get(name, deque()) for name in list(self._lengths)]
            self._weight = news, shared_weight(groups)
        return self._weight[1]

    def group_seconds(self, members: Sequence[QueuedRequest], slots: int) -> GroupSeconds | None:
        """The median of several draws of all lengths: the last of several ends later than the mean
        of each.  Whole rounds of waiting requests are only counted.
        """
        full_step = self._step.seconds(float(slots))
        if full_step is None:
            return None
        decoding = [request for request in members if request.is_decoding]
        running, evicted = decoding[:slots], decoding[slots:]
        waiting = [*evicted, *(request for request in members if not request.is_decoding)]
        survival = self._kept_survival(members[0].group, [each.num_tokens for each in running])
        means = [_mean(request, survival) for request in waiting]
        prompts = self._prefill.seconds(sum(request.prompt_tokens for request in waiting)) / slots
        num_counted = max(0, len(waiting) // slots - 2) * slots
        counted = sum(means[:num_counted]) / slots * full_step
        simulated = [*running, *waiting[num_counted:]]
        draws = max(1, min(MAX_DRAWS, DRAWN_LENGTHS // len(simulated)))
        ends = []
        for draw in range(draws):
            rank = (draw + 0.5) / draws
            lengths = [
                _drawn(request, survival, rank + _GOLDEN * index)
                for index, request in enumerate(simulated)
            ]
            spans = simulate_queue(
                lengths[: len(running)], lengths[len(running) :], slots, self._seconds
            )
            ends.append(max(end for _, end in spans))
        tokens = sum(_mean(request, survival) for request in running) + sum(means)
        total = median(ends) + counted + prompts
        # A prefill delays its own slot; how it slows the others is in their d(b).
        return GroupSeconds(total, min(total, tokens / slots * full_step + prompts))

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """Until a slot is free, the prefills before it and its own, and a step."""
        played = self._play(request, queue)
        return None if played is None else played[0]

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """With an answer of its group's mean length."""
        played = self._play(request, queue)
        return None if played is None else played[1]

    def _play(self, request: QueuedRequest, queue: QueueState) -> tuple[float, float] | None:
        """(first token, last token) in seconds from now."""
        step = self._step.seconds(1.0)
        if step is None:
            return None
        requests = queue.requests
        ahead, running = requests.ahead(request), list(requests.running)
        tokens = self._mean(running)
        rests = [tokens(other) for other in running]
        mean = self._mean_ahead(ahead, running)
        start, end = simulate_behind(
            rests, (ahead.num_requests, mean), tokens(request), queue.slots, self._seconds
        )
        before = self._prefill.seconds(ahead.prompt_tokens)
        # With free slots all prompts ahead are prefilled first, else one in each slot in parallel.
        prompts = self._prefill.seconds(request.prompt_tokens) + (
            before if start == 0 else before / max(1, queue.slots)
        )
        return start + prompts + self._seconds(len(running) + 1), end + prompts

    def _mean(self, running: Sequence[QueuedRequest]) -> Callable[[QueuedRequest], float]:
        """Function: mean number of tokens that a request still has."""
        going: dict[str, list[int]] = {}
        for other in running:
            going.setdefault(other.group, []).append(other.num_tokens)

        def tokens(request: QueuedRequest) -> float:
            return _mean(request, self._kept_survival(request.group, going.get(request.group, [])))

        return tokens

    def _mean_ahead(self, ahead: QueueAhead, running: Sequence[QueuedRequest]) -> float:
        """Mean tokens of the waiting requests; 0 without any."""
        tokens, total = self._mean(running), 0.0
        for (group, _), (number, max_tokens) in ahead.alike.items():
            total += number * tokens(QueuedRequest(group, 0, max(1, max_tokens // number)))
        return total / ahead.num_requests if ahead.num_requests else 0.0

    def _kept_survival(self, group: str, going: Sequence[int]) -> Survival:
        """Recomputed when 1/20 of the group is new, or its running answers grew by 1/8."""
        num_own = self._num_own.get(group, 0)
        news = _steps(num_own, 20), _steps(self._num_seen, 10), len(going), _steps(sum(going), 8)
        kept = self._kept.get(group, None)
        if kept is None or kept[0] != news:
            kept = news, self.survival(group, going)
            self._kept.put(group, kept)
        return kept[1]

    def _seconds(self, batch: float) -> float:
        seconds = self._step.seconds(batch)
        assert seconds is not None, "asked for before"
        return seconds


def _steps(number: int, per_doubling: int) -> int:
    """A whole number that grows by `per_doubling` each time `number` doubles.

    >>> [_steps(number, 8) for number in (0, 1, 2, 3)]
    [0, 8, 12, 16]
    """
    return int(per_doubling * log2(1 + number))


def _mean(request: QueuedRequest, survival: Survival) -> float:
    left = max(1, request.max_tokens - request.num_tokens)
    return min(float(left), survival.mean_beyond(request.num_tokens))


def _drawn(request: QueuedRequest, survival: Survival, rank: float) -> float:
    left = max(1, request.max_tokens - request.num_tokens)
    return min(float(left), survival.quantile_beyond(request.num_tokens, rank % 1.0))


def make_estimator(policy: EstimationSpec) -> Estimator | None:
    """By the names of `qos.estimation.estimator`; None for `ema`, whose averages are in
    `routing.qos`.
    """
    milliseconds = policy.preset_token_milliseconds
    presets = Presets(
        None if milliseconds is None else milliseconds / 1000.0, float(policy.preset_output_tokens)
    )
    if policy.estimator == "rwt":
        return RwtEstimator(presets)
    return LoadAware(presets) if policy.estimator == "loadAware" else None
