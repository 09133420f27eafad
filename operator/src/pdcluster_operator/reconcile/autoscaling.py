"""Rounds of scrapes of a PDCluster that is scaled by metrics, and the decision on each. One that
changes something is written into the status by the next reconcile, unless generation or workloads
have changed meanwhile; then the next round decides.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pdcluster_api.apiserver.kinds import PDCLUSTER, POD, SERVICE, Key
from pdcluster_api.apiserver.observe import Live, ready_workers
from pdcluster_api.plan.autoscale.attainment import GateTotals, attainment, first_round
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.autoscale.rules import GRACE_ROUNDS
from pdcluster_api.plan.autoscale.values import Clock, Memory, Outcome
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.flips import as_served, requested_flips
from pdcluster_api.plan.gates import BAKING, read_gate
from pdcluster_api.plan.observed.pools import DeclaredRevision, ending_of
from pdcluster_api.plan.observed.state import Attainment, Observed, ScalingDecision
from pdcluster_api.plan.sizes import ScrapeState, is_unschedulable, pool_facts
from pdcluster_api.plan.status.autoscaled import has_changed, recorded
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.page import ScrapeTarget
from pdcluster_operator.scrape.scraper import ScrapeMetrics, Scraper, scrape_round
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema import labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import HTTP_PORT, join_address
from pdcluster_schema.workload import PoolKey

logger = logging.getLogger(__name__)

# Most seconds between two looks at the routers of a cluster that sleeps, which wake it
WAKE_SECONDS = 5


@dataclass(frozen=True)
class Scaling:
    cache: Cache
    scraper: Scraper
    scrapes: ScrapeMetrics
    metrics: AutoscaleMetrics
    port: int = HTTP_PORT  # of the workers' HTTP listeners
    clock: Callable[[], float] = time.monotonic  # seconds that never jump
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # wall-clock time, in UTC


@dataclass
class _GateCount:
    """Latencies since a gate bakes.  counted_since: RFC 3339; empty = all of its time"""

    gate: str  # when it began, RFC 3339
    totals: GateTotals
    counted_since: str = ""


@dataclass
class _Followed:
    cluster: PDCluster  # of the last reconcile
    observed: Observed
    next_at: float  # when its next round begins
    windows: Windows
    outcome: Outcome | None = None  # the last decision that was kept, or that a reconcile has taken
    # the decision of the newest round and the state that it holds for, for the reconcile that the
    # round enqueued
    pending: tuple[Outcome, object] | None = None
    # pods that drain or terminate, scraped as long as they run
    leaving: frozenset[str] = frozenset()
    # since when each pod has been unschedulable, by name
    unschedulable_since: dict[str, float] = field(default_factory=dict)
    totals: _GateCount | None = None  # of the gate that bakes
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None  # that runs the rounds; None = not begun


@dataclass
class Autoscaling:
    key: Key
    shared: Scaling
    enqueue: Callable[[], None]  # enqueues the PDCluster
    _state: _Followed | None = None

    @property
    def windows(self) -> Windows | None:
        """The newest numbers of its workers; None = it is not followed."""
        return None if self._state is None else self._state.windows

    @property
    def has_decided(self) -> bool:
        return self._state is not None and self._state.pending is not None

    def follow(self, cluster: PDCluster, observed: Observed) -> ScalingDecision | None:
        """Scrape the workers from now on, as the spec says; with mode Off no longer.  Returns the
        decision that a round has made on this state; None = there is none.
        """
        state, now = self._state, self.shared.clock()
        if cluster.spec.autoscale.mode == "Off":
            self.stop()
            return None
        if state is None:
            state = self._state = _Followed(cluster, observed, now, Windows(self.key))
            state.task = asyncio.create_task(self._run(state), name=f"rounds of {self.key}")
            return None
        before, after = state.cluster.spec.autoscale, cluster.spec.autoscale
        state.cluster, state.observed = cluster, observed
        if after != before:
            state.next_at = min(state.next_at, now + self._interval(state))
            state.wake.set()
        pending, state.pending = state.pending, None
        if pending is None or pending[1] != _version(observed):
            return None
        self._keep(state, pending[0])
        return pending[0].decision

    def attainment(self, cluster: PDCluster, status: Mapping[str, Any]) -> Attainment | None:
        """Latencies since the gate of a roll out bakes; None = it asks for none."""
        since = _counted_gate(cluster, status)
        if since is None:
            return None
        if self._state is None:
            return Attainment()
        declared = DeclaredRevision.of(cluster.spec)
        names = {
            declared.workload(cluster.metadata.name, role, pool.name).name
            for role, spec in cluster.spec.roles.computing().items()
            for pool in spec.pools
        }
        found = self._counted(self._state, since)
        return attainment(cluster.spec.autoscale, names, found.totals, found.counted_since)

    def _counted(self, state: _Followed, gate: str) -> _GateCount:
        """With the newest rounds, which are kept for so many rounds alone."""
        pools, found = state.windows.pools(), state.totals
        if found is None or found.gate != gate:
            now, wall = self.shared.clock(), self.shared.now()
            age = (wall - datetime.fromisoformat(gate)).total_seconds()
            missed = (first_round(pools) or now) - (now - age)
            late = datetime.fromisoformat(gate) + timedelta(seconds=missed)
            is_late = missed > GRACE_ROUNDS * state.cluster.spec.autoscale.interval_seconds
            found = _GateCount(gate, GateTotals(now - age), _text(late) if is_late else "")
        state.totals = replace(found, totals=found.totals.with_rounds(pools))
        return state.totals

    def stop(self) -> asyncio.Task[None] | None:
        """Forget all: the PDCluster is gone, refused, or no longer scaled by metrics.  Returns its
        rounds, which are cancelled.
        """
        state, self._state = self._state, None
        if state is None or state.task is None:
            return None
        state.task.cancel()
        self.shared.scrapes.forget(self.key)
        self.shared.metrics.forget(self.key)
        return state.task

    def _keep(self, state: _Followed, outcome: Outcome) -> None:
        self.shared.metrics.show(self.key, outcome, state.outcome)
        state.outcome = outcome
        if state.cluster.spec.may_sleep and not any(outcome.decision.replicas.values()):
            state.next_at = min(state.next_at, self.shared.clock() + WAKE_SECONDS)
            state.wake.set()

    async def _run(self, state: _Followed) -> None:
        while True:
            now = self.shared.clock()
            if state.next_at > now:
                state.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(state.next_at - now):
                        await state.wake.wait()
                continue
            spec = state.cluster.spec.autoscale
            state.next_at = max(state.next_at + self._interval(state), now)
            try:
                targets = self._targets(state.leaving)
                scraper, scrapes = self.shared.scraper, self.shared.scrapes
                await scrape_round(scraper, scrapes, state.windows, targets, spec.stale_after)
                self._decide(state, [target.pod for target in targets])
            except Exception:  # its next round goes on
                logger.exception("round of scrapes failed key=%s", self.key)

    def _interval(self, state: _Followed) -> float:
        """Seconds between two rounds; also after one that fails a cluster that sleeps wakes."""
        spec, body = state.cluster.spec, self.shared.cache.get(PDCLUSTER.name, *self.key)
        sizes = recorded({} if body is None else body.get("status", {}), spec.autoscale.mode)
        sleeps = spec.may_sleep and sizes is not None and not any(sizes.values())
        interval = spec.autoscale.interval_seconds
        return min(interval, WAKE_SECONDS) if sleeps else interval

    def _decide(self, state: _Followed, scraped: Iterable[str]) -> None:
        """Keep the round's decision, or enqueue the PDCluster if it changes something."""
        state.pending = None
        body = self.shared.cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return
        gate = _counted_gate(state.cluster, body.get("status", {}))
        if gate is not None:
            self._counted(state, gate)
        # As the last reconcile has left it.
        observed = replace(state.observed, status=body.get("status", {}))
        clock = Clock(self.shared.clock(), self.shared.now())
        lost = ending_of(observed, clock.wall.isoformat()).lost
        scrape_state = ScrapeState(frozenset(scraped), _waits(state, observed, clock.now), lost)
        facts = pool_facts(requested_sizes(state.cluster, observed), observed, scrape_state)
        state.leaving = frozenset[str]().union(*(each.leaving for each in facts))
        state.windows.leave(state.leaving)
        memory = Memory() if state.outcome is None else state.outcome.memory
        spec = state.cluster.spec
        outcome = decide(spec, facts, state.windows.pools(), memory, clock)
        if has_changed(spec.autoscale, replace(observed, decision=outcome.decision)):
            state.pending = outcome, _version(observed)
            self.enqueue()
        else:
            self._keep(state, outcome)

    def _targets(self, leaving: frozenset[str]) -> Sequence[ScrapeTarget]:
        cache = self.shared.cache
        body = cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return ()
        live = Live(body, list(cache.children(self.key, (POD.name, SERVICE.name))))
        service = live.own("Service").get(self.key.name)
        selector = {} if service is None else service["spec"].get("selector", {})
        served = {} if self._state is None else _served(self._state)
        workers = ready_workers(live, selector.get(labels.REVISION), leaving)
        return [
            ScrapeTarget(
                *(self.key, *served.get(pod["metadata"]["name"], (workload.role, workload.pool))),
                pod["metadata"]["name"],
                join_address(str(pod["status"]["podIP"]), self.shared.port),
                workload.name,
            )
            for workload, pod in workers
            if pod["status"].get("podIP")
        ]


def _counted_gate(cluster: PDCluster, status: Mapping[str, Any]) -> str | None:
    """Begin of the gate that bakes and counts requests, RFC 3339; None = there is none."""
    gate = read_gate(status)
    if cluster.spec.rollout.min_requests is None or gate is None or gate.state != BAKING:
        return None
    return gate.since


def _text(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _served(state: _Followed) -> Mapping[str, PoolKey]:
    """The pool as whose worker each flipped one serves, by its pod."""
    spec, observed = state.cluster.spec, state.observed
    pair = flexible_pair(spec)
    found = as_served(pair, requested_flips(spec, observed), observed).workloads if pair else ()
    return {pod.name: (each.id.role, each.id.pool) for each in found for pod in each.guests}


def _waits(state: _Followed, observed: Observed, now: float) -> Mapping[str, float]:
    """Seconds for which each unschedulable pod has been so, by name."""
    known = state.unschedulable_since
    pods = [pod for each in observed.workloads for pod in each.pods if is_unschedulable(pod)]
    state.unschedulable_since = {pod.name: known.get(pod.name, now) for pod in pods}
    return {name: now - since for name, since in state.unschedulable_since.items()}


def _version(observed: Observed) -> object:
    workloads = frozenset(state.id for state in observed.workloads)
    return observed.generation, observed.service_revision, workloads
