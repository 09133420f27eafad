"""The operator's autoscaler over a simulated cluster: scrape, decide, start and drain workers.

Second 0 is midnight UTC between a Sunday and a Monday, for schedules.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.autoscale.rules import MAX_ROUNDS
from pdcluster_api.plan.autoscale.values import Clock, Memory, PoolFacts, PoolSample, WorkerSample
from pdcluster_api.plan.observed.state import Flipped, ScalingDecision
from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_schema.workload import PoolKey
from pdcluster_simulator.fleet import Fleet
from pdcluster_simulator.results import PoolLatencies
from pdcluster_simulator.workers import ClusterWorker

MIDNIGHT = datetime(2026, 1, 5, tzinfo=UTC)
Scrapes = Mapping[PoolKey, PoolSample]


@dataclass(frozen=True)
class Decision:
    """One round.  over: roles with a signal over its threshold; record: None = nothing changed"""

    seconds: float
    over: frozenset[str]
    record: ScalingDecision | None
    problems: tuple[str, ...]
    num_cut: int


@dataclass(slots=True)
class _Seen:
    """A worker's counters at the round before."""

    busy: float = 0.0
    prefill: float = 0.0
    prompt_tokens: int = 0
    requests: int = 0
    request_tokens: int = 0


class SimulatedAutoscaler:
    """Its rounds are by the time of the trace."""

    def __init__(self, fleet: Fleet) -> None:
        model, self._recorder = fleet.builder.model, fleet.builder.recorder
        self.decisions: list[Decision] = []
        self._fleet, self._spec = fleet, model.spec
        self._pools = {pool.key: pool for pool in model.pools}
        self._windows = {key: deque[PoolSample](maxlen=MAX_ROUNDS) for key in self._pools}
        self._memory = Memory()
        self._pair = flexible_pair(self._spec)
        self._flipped: Flipped | None = None
        self._seen: dict[str, _Seen] = {}
        self._recorder.by_pool = {key: PoolLatencies() for key in self._pools}

    @property
    def is_settled(self) -> bool:
        """No worker starts or drains."""
        return self._fleet.is_settled

    def round(self, now: float, seconds: float, num_cut: int = 0) -> Scrapes:
        """One decision over the `seconds` before, which takes effect from now on."""
        scrapes = {key: self._scraped(key, now, seconds) for key in self._pools}
        self.decide(now, scrapes, num_cut)
        return scrapes

    def decide(self, now: float, scrapes: Scrapes, num_cut: int = 0) -> None:
        """By the scrapes before, and by these, as of now."""
        for key, sample in scrapes.items():
            self._windows[key].append(replace(sample, at=now))
        clock = Clock(now, MIDNIGHT + timedelta(seconds=now))
        facts = [self._facts(key) for key in self._pools]
        outcome = decide(self._spec, facts, self._windows, self._memory, clock)
        self._memory = outcome.memory
        decision = outcome.decision
        over = {
            each.subject
            for each in decision.inputs
            if each.value is not None and each.limit is not None and each.value > each.limit
        }
        self.decisions.append(
            Decision(
                now,
                frozenset(over),
                decision if outcome.changed else None,
                tuple(sorted({problem.reason for problem in decision.problems})),
                num_cut,
            )
        )
        self._flipped = decision.flipped
        self._fleet.scale(decision.replicas, decision.flipped)

    def _away(self, key: PoolKey) -> int:
        """All go back in a roll out."""
        if self._flipped is None or self._fleet.rollout is not None:
            return 0
        return self._flipped.away(key)

    def _facts(self, key: PoolKey) -> PoolFacts:
        fleet, pool = self._fleet, self._pools[key]
        workers, away = fleet.of(key), self._away(key)
        facts = PoolFacts(
            *key,
            pool.gpu,
            fleet.replicas[key] - away,
            len(workers),
            len(fleet.served(key)),
            sum(each.ends for each in workers),
            gpus_per_replica=pool.gpus_per_replica,
        )
        if self._pair is None or key not in self._pair or fleet.rollout is not None:
            return facts
        return replace(
            facts,
            num_away=away,
            is_flipping=any(each.next_pool for each in fleet.workers),
            may_flip=True,
            has_next=any(each.is_ready and each.ordinal == max(0, away) for each in workers),
        )

    def _scraped(self, key: PoolKey, now: float, seconds: float) -> PoolSample:
        ready = sorted(self._fleet.served(key), key=lambda each: each.key)
        samples = tuple(self._sample(worker, seconds) for worker in ready)
        return PoolSample(now, samples, latencies=self._latencies(key))

    def _sample(self, worker: ClusterWorker, seconds: float) -> WorkerSample:
        totals, counted = worker.engine.totals, worker.counted
        seen = self._seen.get(worker.key, _Seen())
        self._seen[worker.key] = _Seen(
            totals.busy_seconds,
            totals.prefill_seconds,
            totals.prompt_tokens,
            counted.requests,
            counted.prompt_tokens,
        )
        busy = min(1.0, max(0.0, totals.busy_seconds - seen.busy) / seconds)
        engine, is_ingress = worker.engine, worker.role != "prefill"
        num_short, short_tokens = worker.waiting_for_blocks
        return WorkerSample(
            worker.key,
            num_requests_running=float(engine.num_running),
            num_requests_waiting=float(engine.num_waiting + num_short),
            prefill_queue_requests=float(worker.credit_queue.num_requests - num_short),
            prefill_queue_tokens=float(worker.credit_queue.num_tokens - short_tokens),
            kv_cache_usage_ratio=1.0 - engine.num_free_blocks / engine.settings.num_blocks,
            engine_busy_ratio=busy,
            request_rate=(counted.requests - seen.requests) / seconds if is_ingress else None,
            prompt_token_rate=(
                (counted.prompt_tokens - seen.request_tokens) / seconds if is_ingress else None
            ),
            prefill_token_rate=(totals.prompt_tokens - seen.prompt_tokens) / seconds,
            prefill_busy_rate=max(0.0, totals.prefill_seconds - seen.prefill) / seconds,
        )

    def _latencies(self, key: PoolKey) -> Mapping[str, LatencyHistogram]:
        found = self._recorder.by_pool[key]
        if key[0] == "prefill":
            return {}
        bounds = (*LATENCY_BUCKETS, float("inf"))
        latencies = {
            name: LatencyHistogram(bounds, _summed(counts), found.seconds[name])
            for name, counts in found.counts.items()
        }
        found.restart()
        return latencies


def _summed(counts: Sequence[float]) -> tuple[float, ...]:
    total, found = 0.0, []
    for count in counts:
        total += count
        found.append(total)
    return tuple(found)
