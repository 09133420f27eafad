"""Numbers of the roles: sums and means over the fresh rounds. A worker with an impossible number
(NaN, negative, absurd) counts as missing; of a draining one only its part of the prefill queue
counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import PoolFacts, PoolSample, WorkerSample


@dataclass
class Totals:
    """Sums over workers, as means over rounds, of one pool or of several together.

    reporting, missing: ready workers with and without fresh numbers
    failing:         those missing of which that is a fault; the others have yet to answer for the
                     first time
    settled:         reporting workers that were there `GRACE_ROUNDS` rounds ago; none before there
                     are so many
    utilization, kv_cache_usage: sums of ratios: 2.5 is what two and a half workers at 100 % would
                     show; utilization is of GPUs (`has_gpu`), or the time in engine steps
    peak_*:          the greatest mean ratio of one worker
    *_change:        growth of the two queues per second, as far as the same workers hold them;
                     negative = they fall
    Rates are per second; None = not known of any worker.
    """

    reporting: int = 0
    missing: int = 0
    failing: int = 0
    settled: int = 0
    num_requests_waiting: float = 0.0
    prefill_queue_requests: float = 0.0
    prefill_queue_tokens: float = 0.0
    utilization: float = 0.0
    kv_cache_usage: float = 0.0
    peak_utilization: float = 0.0
    peak_kv_cache_usage: float = 0.0
    has_gpu: bool = False
    num_requests_waiting_change: float = 0.0
    prefill_queue_requests_change: float = 0.0
    request_rate: float | None = None
    prompt_token_rate: float | None = None
    prefill_token_rate: float | None = None
    prefill_busy_rate: float | None = None

    @property
    def workers(self) -> int:
        return self.reporting + self.missing

    @property
    def prefill_speed(self) -> float | None:
        """Prompt tokens per second of a busy worker; None = not measured."""
        tokens, busy = self.prefill_token_rate or 0.0, self.prefill_busy_rate or 0.0
        return tokens / busy if min(tokens, busy) > _LEAST else None


_MOST = 1e12  # of anything that a worker can count; more is no number of a worker
_LEAST = 1e-9  # a rate below it is none
# clocks of two scrapes differ a little; a ratio above it is something else, such as a percentage
_MOST_RATIO = 1.5

_RATES = (
    "request_rate",
    "prompt_token_rate",
    "prefill_token_rate",
    "prefill_busy_rate",
)


def _sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# How a field of several pools together is made; the others are added
_MERGED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "peak_utilization": max,
    "peak_kv_cache_usage": max,
    "has_gpu": any,
    **dict.fromkeys(_RATES, _sum_known),
}


def fresh_rounds(window: Sequence[PoolSample], now: float, seconds: float) -> Sequence[PoolSample]:
    found = []
    for sample in reversed(window):
        if sample.at > now:
            continue  # of another clock: a process before this one
        if sample.at < now - seconds:
            break
        found.append(sample)
    return found


def read_pool(
    facts: PoolFacts, window: Sequence[PoolSample], rounds: Sequence[PoolSample]
) -> Totals:
    """The totals of one pool.  rounds: the fresh ones of the window, the newest first"""
    totals = Totals()
    if not rounds:
        totals.missing = totals.failing = facts.ready
        return totals
    sane = [
        (sample.at, [worker for worker in sample.workers if _is_sane(worker)]) for sample in rounds
    ]
    newest = [worker for worker in sane[0][1] if worker.pod not in facts.leaving]
    totals.reporting = len(newest)
    scraped = (*(worker.pod for worker in rounds[0].workers), *rounds[0].stale)
    totals.failing = sum(pod not in facts.leaving for pod in scraped) - len(newest)
    # A worker that has never answered is in no round.
    totals.missing = max(totals.failing, facts.ready - totals.reporting)
    totals.settled = _num_settled(newest, window, rounds[0])
    reporting = {worker.pod for worker in newest}
    by_round = [
        (at, [worker for worker in workers if worker.pod in reporting]) for at, workers in sane
    ]
    leaving = [[worker for worker in workers if worker.pod in facts.leaving] for _, workers in sane]
    for (_, workers), drained in zip(by_round, leaving, strict=True):
        for worker in workers:
            _add(totals, worker, len(rounds))
        for worker in (*workers, *drained):
            totals.prefill_queue_requests += worker.prefill_queue_requests / len(rounds)
            totals.prefill_queue_tokens += worker.prefill_queue_tokens / len(rounds)
    all_workers = [worker for _, workers in by_round for worker in workers]
    totals.peak_utilization = _peak((worker.pod, _utilization(worker)) for worker in all_workers)
    totals.peak_kv_cache_usage = _peak(
        (worker.pod, worker.kv_cache_usage_ratio) for worker in all_workers
    )
    _add_changes(totals, by_round, leaving)
    _add_rates(totals, newest)
    return totals


def _peak(ratios: Iterable[tuple[str, float]]) -> float:
    found: dict[str, list[float]] = {}
    for pod, ratio in ratios:
        found.setdefault(pod, []).append(ratio)
    return max((sum(each) / len(each) for each in found.values()), default=0.0)


def _num_settled(
    newest: Sequence[WorkerSample], window: Sequence[PoolSample], sample: PoolSample
) -> int:
    at = window.index(sample)
    if at < rules.GRACE_ROUNDS:
        return 0
    before = {worker.pod for worker in window[at - rules.GRACE_ROUNDS].workers}
    return sum(worker.pod in before for worker in newest)


def _add_changes(
    totals: Totals,
    by_round: Sequence[tuple[float, list[WorkerSample]]],
    leaving: Sequence[list[WorkerSample]],
) -> None:
    """Add the trends of queues of the newest round's workers; one that missed a round adds none.
    by_round: (time, workers that stay) of each round, the newest first; leaving: those that drain
    """
    history: dict[str, list[tuple[float, WorkerSample]]] = {}
    # more would show a turn too late
    newer = zip(by_round[: rules.GRACE_ROUNDS + 1], leaving, strict=False)
    for (at, workers), drained in newer:
        for worker in (*workers, *drained):
            history.setdefault(worker.pod, []).append((at, worker))
    for worker in by_round[0][1]:
        points = [(at, each.num_requests_waiting) for at, each in history[worker.pod]]
        totals.num_requests_waiting_change += _trend(points)
    for worker in (*by_round[0][1], *leaving[0]):
        points = [(at, each.prefill_queue_requests) for at, each in history[worker.pod]]
        totals.prefill_queue_requests_change += _trend(points)


def _trend(points: Sequence[tuple[float, float]]) -> float:
    """Growth of a number per second: mean of the newer (at, value) less that of the older; 0 =
    unknown.

    >>> _trend([(15.0, 1.0), (10.0, 3.0), (5.0, 5.0), (0.0, 7.0)])
    -0.4
    """
    half = len(points) // 2
    newer, older = points[:half], points[len(points) - half :]
    seconds = sum(at for at, _ in newer) - sum(at for at, _ in older)
    return (
        (sum(value for _, value in newer) - sum(value for _, value in older)) / seconds
        if seconds > 0.0
        else 0.0
    )


def _utilization(worker: WorkerSample) -> float:
    return (
        worker.engine_busy_ratio
        if worker.gpu_utilization_ratio is None
        else worker.gpu_utilization_ratio
    )


def _is_sane(worker: WorkerSample) -> bool:
    ratios = (
        worker.kv_cache_usage_ratio,
        worker.engine_busy_ratio,
        worker.gpu_utilization_ratio or 0.0,
    )
    numbers = (
        worker.num_requests_waiting,
        worker.prefill_queue_requests,
        worker.prefill_queue_tokens,
        *ratios,
    )
    return sum(numbers) <= _MOST and min(numbers) >= 0.0 and max(ratios) <= _MOST_RATIO


def _add(totals: Totals, worker: WorkerSample, num_rounds: int) -> None:
    totals.has_gpu |= worker.gpu_utilization_ratio is not None
    totals.num_requests_waiting += worker.num_requests_waiting / num_rounds
    totals.utilization += _utilization(worker) / num_rounds
    totals.kv_cache_usage += worker.kv_cache_usage_ratio / num_rounds


def _add_rates(totals: Totals, workers: Sequence[WorkerSample]) -> None:
    for name in _RATES:
        known = [
            value for worker in workers if (value := _known(getattr(worker, name))) is not None
        ]
        setattr(totals, name, sum(known) if known else None)


def _known(value: float | None) -> float | None:
    return value if value is not None and 0.0 <= value <= _MOST else None


def together(parts: Iterable[Totals]) -> Totals:
    every = [Totals(), *parts]
    names = [each.name for each in fields(Totals)]
    return Totals(
        **{name: _MERGED.get(name, sum)([getattr(part, name) for part in every]) for name in names}
    )
