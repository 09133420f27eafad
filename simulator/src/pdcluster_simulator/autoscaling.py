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
from pdcluster_simulator.cluster import ClusterBuilder
from pdcluster_simulator.results import PoolLatencies
from pdcluster_simulator.workers import ClusterWorker, WorkerState

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
    """start_seconds: until a new worker is ready.  Its rounds are by the time of the trace."""

    def __init__(self, builder: ClusterBuilder, start_seconds: float) -> None:
        self.decisions: list[Decision] = []
        self._builder, self._cell = builder, builder.cell
        self._spec = builder.model.spec
        self._start_seconds = start_seconds
        self._pools = {pool.key: pool for pool in builder.model.pools}
        self._replicas = {pool.key: pool.replicas for pool in builder.model.pools}
        self._windows = {key: deque[PoolSample](maxlen=MAX_ROUNDS) for key in self._pools}
        self._memory = Memory()
        self._pair = flexible_pair(self._spec)
        self._flipped: Flipped | None = None
        self._seen: dict[str, _Seen] = {}
        self._cell.recorder.by_pool = {key: PoolLatencies() for key in self._pools}

    @property
    def is_settled(self) -> bool:
        """No worker starts or drains."""
        return all(each.is_ready for each in self._cell.workers.values())

    def round(self, now: float, seconds: float) -> Scrapes:
        """One decision over the `seconds` before, which takes effect from now on."""
        num_cut = self._advance()
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
        for key, replicas in decision.replicas.items():
            self._scale(key, replicas)
        self._flip()

    # --- workers ----------------------------------------------------------------------------------

    def _of(self, key: PoolKey) -> list[ClusterWorker]:
        """Workers that live in a pool, whichever role they have."""
        return [each for each in self._cell.workers.values() if each.home == key]

    def _served(self, key: PoolKey) -> list[ClusterWorker]:
        workers = self._cell.workers.values()
        return [each for each in workers if each.pool == key and each.is_ready]

    def _away(self, key: PoolKey) -> int:
        return self._flipped.away(key) if self._flipped else 0

    def _facts(self, key: PoolKey) -> PoolFacts:
        workers, pool, away = self._of(key), self._pools[key], self._away(key)
        facts = PoolFacts(
            *key,
            pool.gpu,
            self._replicas[key] - away,
            len(workers),
            len(self._served(key)),
            sum(_ends(each) for each in workers),
            gpus_per_replica=pool.gpus_per_replica,
        )
        if self._pair is None or key not in self._pair:
            return facts
        return replace(
            facts,
            num_away=away,
            is_flipping=any(each.next_pool for each in self._cell.workers.values()),
            may_flip=True,
            has_next=any(each.is_ready and each.ordinal == max(0, away) for each in workers),
        )

    def _scale(self, key: PoolKey, replicas: int) -> None:
        """The highest ordinals drain; draining workers are reused before new ones start."""
        self._replicas[key] = replicas
        workers = {each.ordinal: each for each in self._of(key)}
        changed = False
        for ordinal in range(replicas):
            worker = workers.get(ordinal)
            if worker is None:
                self._builder.add(key, ordinal, WorkerState.STARTING)
            elif _ends(worker):
                self._resume(worker)
                changed = True
        for ordinal, worker in workers.items():
            if ordinal < replicas or _ends(worker):
                continue
            worker.next_pool = None
            if worker.state is WorkerState.STARTING:
                self._cell.remove(worker)
                continue
            self._enter(worker, WorkerState.DRAINING)
            changed = True
        if changed:
            self._drain([*workers.values()])

    def _flip(self) -> None:
        """Workers drain before they take another role; one that is to keep its own goes on."""
        changed = []
        for worker in [] if self._pair is None else [*self._cell.workers.values()]:
            pool = worker.home
            if self._flipped and pool == self._flipped.home:
                is_away = worker.ordinal < self._flipped.workers
                pool = self._flipped.to if is_away else pool
            if worker.is_ready and pool != worker.pool:
                worker.next_pool = pool
                self._enter(worker, WorkerState.DRAINING)
                changed.append(worker)
            elif worker.next_pool is not None and pool == worker.pool:
                worker.next_pool = None
                self._resume(worker)
                changed.append(worker)
        if changed:
            self._drain(changed)

    def _resume(self, worker: ClusterWorker) -> None:
        self._enter(worker, WorkerState.READY)
        if worker.ledger is not None:
            worker.ledger.resume()

    def _drain(self, workers: Sequence[ClusterWorker]) -> None:
        """Let the others know of those that drain."""
        self._cell.renew(self._builder.model.num_routers)
        for worker in workers:
            if worker.state is WorkerState.DRAINING and worker.ledger is not None:
                self._cell.remote.on_draining(worker)

    def _advance(self) -> int:
        """Make workers ready and remove drained ones; returns the requests that a limit has cut."""
        limit = self._spec.rollout.drain_timeout_seconds
        num_cut, changed = 0, False
        for worker in [*self._cell.workers.values()]:
            waited = self._cell.queue.now - worker.since
            if worker.state is WorkerState.STARTING and waited >= self._start_seconds:
                self._enter(worker, WorkerState.READY)
                changed = True
            elif worker.next_pool is not None:
                if waited > 0.0 and not worker.num_active:
                    self._builder.change_role(worker, worker.next_pool)
                    self._enter(worker, WorkerState.READY)
                    changed = True
            elif worker.state is WorkerState.DRAINING and waited > 0.0:
                is_late = limit is not None and waited >= limit
                if is_late and worker.num_active:
                    num_cut += self._cell.cut(worker)
                if is_late or not worker.num_active:
                    self._cell.remove(worker)
        if changed:
            self._cell.renew(self._builder.model.num_routers)
        return num_cut

    def _enter(self, worker: ClusterWorker, state: WorkerState) -> None:
        worker.state, worker.since = state, self._cell.queue.now

    # --- scrapes ----------------------------------------------------------------------------------

    def _scraped(self, key: PoolKey, now: float, seconds: float) -> PoolSample:
        ready = sorted(self._served(key), key=lambda each: each.key)
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
        found = self._cell.recorder.by_pool[key]
        if key[0] == "prefill":
            return {}
        bounds = (*LATENCY_BUCKETS, float("inf"))
        latencies = {
            name: LatencyHistogram(bounds, _summed(counts), found.seconds[name])
            for name, counts in found.counts.items()
        }
        found.restart()
        return latencies


def _ends(worker: ClusterWorker) -> bool:
    """Return whether it drains to go, and not to take another role."""
    return worker.state is WorkerState.DRAINING and worker.next_pool is None


def _summed(counts: Sequence[float]) -> tuple[float, ...]:
    total, found = 0.0, []
    for count in counts:
        total += count
        found.append(total)
    return tuple(found)
