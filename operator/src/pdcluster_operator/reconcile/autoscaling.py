"""Rounds of scrapes of a PDCluster that is scaled by metrics, and the decision on each.

A round ends with the one decision on its numbers, beside what the last reconcile has
observed: each event starts another reconcile, so that still holds.  A decision that
changes nothing is kept here.  Any other is handed to the reconcile that the round
enqueues, which writes it into the status.  It is valid while the object's generation
and its workloads are those that it was made on; else that reconcile goes on from the
status, and the next round decides.  State kept here is lost with the process, which
only makes the autoscaler wait longer.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pdcluster_api.apiserver.kinds import PDCLUSTER, POD, SERVICE, Key
from pdcluster_api.apiserver.observe import Live, ready_workers
from pdcluster_api.manifests.objects import HTTP_PORT
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import Clock, Memory, Outcome
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.decision import ScalingDecision
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.sizes.pool_facts import ScrapeState, is_unschedulable, pool_facts
from pdcluster_api.plan.status.autoscaled import has_changed
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.scraper import Scraper, scrape_round
from pdcluster_operator.scrape.values import ScrapeTarget
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema import labels
from pdcluster_schema.addresses import join_address
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster

logger = logging.getLogger(__name__)


@dataclass
class AutoscaleState:
    """State while a PDCluster is followed.

    cluster, observed: of the last reconcile
    next_at: when its next round begins
    outcome: the last decision that was kept, or that a reconcile has taken
    leaving: pods that drain or terminate, scraped as long as they run
    task:    that runs the rounds; None = not begun
    _pending: the decision of the newest round, for the reconcile that it enqueued
    _unschedulable_since: since when each pod has been unschedulable, by name
    """

    cluster: PDCluster
    observed: Observed
    next_at: float
    windows: Windows
    outcome: Outcome | None = None
    leaving: frozenset[str] = frozenset()
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    _pending: Outcome | None = None
    _pending_version: object = None
    _unschedulable_since: dict[str, float] = field(default_factory=dict)

    @property
    def spec(self) -> AutoscaleSpec:
        """The autoscale section of its spec."""
        return self.cluster.spec.autoscale

    @property
    def memory(self) -> Memory:
        """Memory of the last decision."""
        return Memory() if self.outcome is None else self.outcome.memory

    @property
    def has_decided(self) -> bool:
        """Return whether a decision waits for a reconcile."""
        return self._pending is not None

    def put(self, outcome: Outcome, observed: Observed) -> None:
        """Keep a decision, made on this state, for the next reconcile."""
        self._pending, self._pending_version = outcome, _version(observed)

    def drop(self) -> None:
        """Drop the decision that waits: a newer one is being made."""
        self._pending = None

    def pop(self) -> Outcome | None:
        """Return the decision that waits, once; None = there is none that is still valid."""
        pending, self._pending = self._pending, None
        return pending if self._pending_version == _version(self.observed) else None

    def waits(self, observed: Observed, now: float) -> Mapping[str, float]:
        """Seconds for which each unschedulable pod has been so, by name."""
        pods = {
            pod.name for state in observed.workloads for pod in state.pods if is_unschedulable(pod)
        }
        self._unschedulable_since = {
            name: self._unschedulable_since.get(name, now) for name in pods
        }
        return {name: now - since for name, since in self._unschedulable_since.items()}


def _version(observed: Observed) -> object:
    """State that a decision is valid for: generation, serving revision and workloads."""
    workloads = frozenset(state.id for state in observed.workloads)
    return observed.generation, observed.service_revision, workloads


@dataclass(frozen=True)
class Scaling:
    """Parts that the autoscaling of all PDClusters shares.

    port:  of the workers' HTTP listeners
    clock: seconds that never jump
    now:   wall-clock time, in UTC
    """

    cache: Cache
    scraper: Scraper
    scrapes: ScrapeMetrics
    metrics: AutoscaleMetrics
    port: int = HTTP_PORT
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass
class Autoscaling:
    """The autoscaling of one PDCluster.

    enqueue: enqueues the PDCluster
    """

    key: Key
    shared: Scaling
    enqueue: Callable[[], None]
    _state: AutoscaleState | None = None

    @property
    def windows(self) -> Windows | None:
        """The newest numbers of its workers; None = it is not followed."""
        return None if self._state is None else self._state.windows

    @property
    def has_decided(self) -> bool:
        """Return whether a decision waits for a reconcile."""
        return self._state is not None and self._state.has_decided

    def follow(self, cluster: PDCluster, observed: Observed) -> ScalingDecision | None:
        """Scrape the workers from now on, as the spec says; with mode Off no longer.

        Returns the decision that a round has made on this state; None = there is none.
        """
        state, now = self._state, self.shared.clock()
        if cluster.spec.autoscale.mode == "Off":
            self.stop()
            return None
        if state is None:
            state = self._state = AutoscaleState(cluster, observed, now, Windows(self.key))
            state.task = asyncio.create_task(self._run(state), name=f"rounds of {self.key}")
            return None
        before, state.cluster, state.observed = state.spec, cluster, observed
        if state.spec != before:
            state.next_at = min(state.next_at, now + state.spec.interval_seconds)
            state.wake.set()
        return self._pop(state)

    def stop(self) -> asyncio.Task[None] | None:
        """Forget all: the PDCluster is gone, refused, or no longer scaled by metrics.

        Returns its rounds, which are cancelled.
        """
        state, self._state = self._state, None
        if state is None or state.task is None:
            return None
        state.task.cancel()
        self.shared.scrapes.forget(self.key)
        self.shared.metrics.forget(self.key)
        return state.task

    def _pop(self, state: AutoscaleState) -> ScalingDecision | None:
        outcome = state.pop()
        if outcome is None:
            return None
        self._keep(state, outcome)
        return outcome.decision

    def _keep(self, state: AutoscaleState, outcome: Outcome) -> None:
        self.shared.metrics.show(self.key, outcome, state.outcome)
        state.outcome = outcome

    def _decide(self, state: AutoscaleState, scraped: Iterable[str]) -> bool:
        """Decide on a round; returns whether a reconcile has to write the decision.

        scraped: pods of the round
        """
        state.drop()
        body = self.shared.cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return False
        # As the last reconcile has left it.
        observed = replace(state.observed, status=body.get("status", {}))
        clock = Clock(self.shared.clock(), self.shared.now())
        scrape_state = ScrapeState(frozenset(scraped), state.waits(observed, clock.now))
        facts = pool_facts(requested_sizes(state.cluster, observed), observed, scrape_state)
        state.leaving = frozenset[str]().union(*(each.leaving for each in facts))
        state.windows.leave(state.leaving)
        windows = state.windows.pools()
        outcome = decide(state.cluster.spec, facts, windows, state.memory, clock)
        if has_changed(state.spec, replace(observed, decision=outcome.decision)):
            state.put(outcome, observed)
            return True
        self._keep(state, outcome)
        return False

    async def _run(self, state: AutoscaleState) -> None:
        """Run one round after the other, each when it is due."""
        while True:
            now = self.shared.clock()
            if state.next_at <= now:
                state.next_at = max(state.next_at + state.spec.interval_seconds, now)
                await self._round(state)
                continue
            state.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(state.next_at - now):
                    await state.wake.wait()

    async def _round(self, state: AutoscaleState) -> None:
        try:
            targets = self._targets(state.leaving)
            scraper, scrapes = self.shared.scraper, self.shared.scrapes
            await scrape_round(scraper, scrapes, state.windows, targets, state.spec.stale_after)
            if self._decide(state, [target.pod for target in targets]):
                self.enqueue()
        except Exception:  # its next round goes on
            logger.exception("round of scrapes failed key=%s", self.key)

    def _targets(self, leaving: frozenset[str]) -> Sequence[ScrapeTarget]:
        cache = self.shared.cache
        body = cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return ()
        live = Live(body, list(cache.children(self.key, (POD.name, SERVICE.name))))
        service = live.own("Service").get(self.key.name)
        revision = (
            None if service is None else service["spec"].get("selector", {}).get(labels.REVISION)
        )
        return [
            ScrapeTarget(
                self.key,
                workload.role,
                workload.pool,
                pod["metadata"]["name"],
                join_address(str(pod["status"]["podIP"]), self.shared.port),
            )
            for workload, pod in ready_workers(live, revision, leaving)
            if pod["status"].get("podIP")
        ]
