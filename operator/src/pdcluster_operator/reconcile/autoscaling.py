"""Rounds of scrapes of a PDCluster that is scaled by metrics, and the decision on each.

A reconcile sets whether to follow the cluster, and its observation.  A round ends with
a decision on that and on the new numbers.  One that changes nothing is dropped; for any
other the PDCluster is enqueued, and the reconcile decides, once, on its own
observation.  A reconcile in between decides nothing, and goes on from the record in
the status.  State kept here is lost with the process, which only makes the
autoscaler wait longer.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.kinds import PDCLUSTER
from pdcluster_api.apiserver.observe import Live, ready_workers
from pdcluster_api.manifests.objects import HTTP_PORT
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import Clock, Memory, Outcome
from pdcluster_api.plan.cluster import asked_of
from pdcluster_api.plan.observed.decision import RecordedDecision
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.sizes.pool_facts import Seen, is_unschedulable, pool_facts
from pdcluster_api.plan.status.autoscaled import has_changed
from pdcluster_api.schema import labels
from pdcluster_api.schema.autoscale import AutoscaleSpec
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.text import address_of
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.rounds import Rounds
from pdcluster_operator.scrape.values import Target
from pdcluster_operator.scrape.windows import Windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scaling:
    """Parts that the autoscaling of all PDClusters shares.

    port:  of the workers' HTTP listeners
    clock: seconds that never jump
    now:   wall-clock time, in UTC
    """

    cache: Cache
    rounds: Rounds
    metrics: AutoscaleMetrics
    port: int = HTTP_PORT
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass
class _Followed:
    """State while a PDCluster is followed.

    next_at: when its next round begins
    scraped: pods of the newest round without a decision yet; None = there is none
    last:    observation of the last reconcile
    outcome: the last decision that was kept
    leaving: pods that drain or terminate, scraped as long as they run
    waiting: since when each pod has been unschedulable, by name
    task:    that runs the rounds; None = not begun
    """

    spec: AutoscaleSpec
    next_at: float
    windows: Windows
    scraped: tuple[str, ...] | None = None
    last: tuple[PDCluster, Observed] | None = None
    outcome: Outcome | None = None
    leaving: frozenset[str] = frozenset()
    waiting: dict[str, float] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def memory(self) -> Memory:
        return Memory() if self.outcome is None else self.outcome.memory


@dataclass
class Autoscaling:
    """The autoscaling of one PDCluster.

    enqueue: enqueues the PDCluster
    """

    key: Key
    shared: Scaling
    enqueue: Callable[[], None]
    _followed: _Followed | None = None

    @property
    def windows(self) -> Windows | None:
        """The newest numbers of its workers; None = it is not followed."""
        return None if self._followed is None else self._followed.windows

    def follow(self, spec: AutoscaleSpec) -> None:
        """Scrape the workers from now on, as the spec says; with mode Off no longer."""
        followed, now = self._followed, self.shared.clock()
        if spec.mode == "Off":
            self.stop()
        elif followed is None:
            followed = self._followed = _Followed(spec, now, Windows(self.key))
            followed.task = asyncio.create_task(self._run(followed), name=f"rounds of {self.key}")
        elif followed.spec != spec:
            followed.spec, followed.next_at = spec, min(followed.next_at, now + spec.interval_seconds)
            followed.wake.set()

    def stop(self) -> asyncio.Task[None] | None:
        """Forget all: the PDCluster is gone, refused, or no longer scaled by metrics.

        Returns its rounds, which are cancelled.
        """
        followed, self._followed = self._followed, None
        if followed is None or followed.task is None:
            return None
        followed.task.cancel()
        self.shared.rounds.metrics.forget(self.key)
        self.shared.metrics.forget(self.key)
        return followed.task

    def decide(self, cluster: PDCluster, observed: Observed) -> RecordedDecision | None:
        """Decide on the numbers of the newest round; None = none since the last decision."""
        followed = self._followed
        if followed is None:
            return None
        followed.last = cluster, observed
        if followed.scraped is None:
            return None
        outcome, record = self._outcome(followed, cluster, observed)
        self._keep(followed, outcome)
        return record

    def _outcome(self, followed: _Followed, cluster: PDCluster, observed: Observed) -> tuple[Outcome, RecordedDecision]:
        clock = Clock(self.shared.clock(), self.shared.now())
        seen = Seen(frozenset(followed.scraped or ()), _waits(followed, observed, clock.now))
        facts = pool_facts(asked_of(cluster, observed), observed, seen)
        followed.leaving = frozenset[str]().union(*(each.leaving for each in facts))
        followed.windows.leave(followed.leaving)
        outcome = decide(cluster.spec, facts, followed.windows.pools(), followed.memory, clock)
        return outcome, RecordedDecision(clock.wall, outcome.decision, outcome.problems)

    def _keep(self, followed: _Followed, outcome: Outcome) -> None:
        self.shared.metrics.show(self.key, outcome, followed.outcome)
        followed.scraped, followed.outcome = None, outcome

    def _needs_reconcile(self, followed: _Followed) -> bool:
        """Decide on a round; a change of status is left to a reconcile, and nothing of it is kept
        here.

        The observation of the last reconcile still holds: each event starts another one.
        """
        body = self.shared.cache.get(PDCLUSTER.name, *self.key)
        if body is None or followed.last is None:
            return True
        cluster, observed = followed.last
        observed = replace(observed, status=body.get("status", {}))  # as that reconcile has left it
        outcome, record = self._outcome(followed, cluster, observed)
        if has_changed(cluster.spec.autoscale, replace(observed, decision=record)):
            return True
        self._keep(followed, outcome)
        return False

    async def _run(self, followed: _Followed) -> None:
        """Run one round after the other, each when it is due."""
        while True:
            now = self.shared.clock()
            if followed.next_at <= now:
                followed.next_at = max(followed.next_at + followed.spec.interval_seconds, now)
                await self._round(followed)
                continue
            followed.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(followed.next_at - now):
                    await followed.wake.wait()

    async def _round(self, followed: _Followed) -> None:
        try:
            targets = self._targets(followed.leaving)
            await self.shared.rounds.run(followed.windows, targets, followed.spec.stale_after)
            followed.scraped = tuple(target.pod for target in targets)
            if self._needs_reconcile(followed):
                self.enqueue()
        except Exception:  # its next round goes on
            logger.exception("round of scrapes failed key=%s", self.key)

    def _targets(self, leaving: frozenset[str]) -> Sequence[Target]:
        cache = self.shared.cache
        body = cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return ()
        live = Live(body, cache.children(self.key))
        service = live.own("Service").get(self.key.name)
        revision = None if service is None else service["spec"].get("selector", {}).get(labels.REVISION)
        return [
            Target(
                self.key, workload.role, workload.pool, pod["metadata"]["name"], address_of(str(pod["status"]["podIP"]), self.shared.port)
            )
            for workload, pod in ready_workers(live, revision, leaving)
            if pod["status"].get("podIP")
        ]


def _waits(followed: _Followed, observed: Observed, now: float) -> Mapping[str, float]:
    pods = {pod.name for state in observed.workloads for pod in state.pods if is_unschedulable(pod)}
    followed.waiting = {name: followed.waiting.get(name, now) for name in pods}
    return {name: now - since for name, since in followed.waiting.items()}
