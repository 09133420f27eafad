"""Rounds of scrapes of every PDCluster that is scaled by metrics, and the decision on each.

A reconcile sets the clusters to follow, and its observation.  A round ends with a
decision on that and on the new numbers.  One that changes nothing is dropped; for any
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

from prometheus_client import CollectorRegistry

from pdcluster_operator.api import labels
from pdcluster_operator.api.autoscale import AutoscaleSpec
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.cluster.cache import Cache, Key
from pdcluster_operator.cluster.kinds import PDCLUSTER
from pdcluster_operator.cluster.observe import Live, ready_workers
from pdcluster_operator.manifests.objects import HTTP_PORT
from pdcluster_operator.plan.autoscale.decide import decide
from pdcluster_operator.plan.autoscale.explain import RecordedDecision
from pdcluster_operator.plan.autoscale.values import Clock, Memory, Outcome
from pdcluster_operator.plan.autoscaled import has_changed
from pdcluster_operator.plan.cluster import asked_of
from pdcluster_operator.plan.pool_facts import Seen, is_unschedulable, pool_facts
from pdcluster_operator.plan.state import Observed
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.rounds import Rounds
from pdcluster_operator.scrape.scraper import Scraper
from pdcluster_operator.scrape.values import Target

logger = logging.getLogger(__name__)


@dataclass
class _Followed:
    """One PDCluster.

    next_at:  when its next round begins
    in_round: whether one is under way
    scraped:  pods of the newest round without a decision yet; None = there is none
    last:     observation of the last reconcile
    leaving:  pods that drain or terminate, scraped as long as they run
    waiting:  since when each pod has been unschedulable, by name
    """

    spec: AutoscaleSpec
    next_at: float
    in_round: bool = False
    scraped: tuple[str, ...] | None = None
    last: tuple[PDCluster, Observed] | None = None
    leaving: frozenset[str] = frozenset()
    memory: Memory = field(default_factory=Memory)
    waiting: dict[str, float] = field(default_factory=dict)


class Autoscaling:
    """All PDClusters of the process.

    enqueue: adds a key to the work queue
    port:  of the workers' HTTP listeners
    clock: seconds that never jump
    now:   wall-clock time, in UTC
    """

    def __init__(
        self,
        cache: Cache,
        add: Callable[[Key], None],
        registry: CollectorRegistry,
        *,
        port: int = HTTP_PORT,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache, self._add, self._port, self._clock, self._now = cache, add, port, clock, now
        self._scraper = Scraper(clock=clock)
        self._rounds = Rounds(self._scraper, registry, clock)
        self._metrics = AutoscaleMetrics(registry)
        self._followed: dict[Key, _Followed] = {}
        self._wake = asyncio.Event()

    def follow(self, key: Key, spec: AutoscaleSpec) -> None:
        """Scrape a PDCluster from now on, as its spec says; with mode Off no longer."""
        known = self._followed.get(key)
        if spec.mode == "Off":
            self.forget(key)
        elif known is None:
            self._followed[key] = _Followed(spec, self._clock())
            self._wake.set()
        elif known.spec != spec:
            known.spec, known.next_at = spec, min(known.next_at, self._clock() + spec.interval_seconds)
            self._wake.set()

    def forget(self, key: Key) -> None:
        """A PDCluster is gone, refused, or no longer scaled by metrics."""
        if self._followed.pop(key, None) is not None:
            self._rounds.forget(key)
            self._metrics.forget(key)

    def decide(self, key: Key, cluster: PDCluster, observed: Observed) -> RecordedDecision | None:
        """Decide on the numbers of the newest round; None = none since the last decision."""
        followed = self._followed.get(key)
        if followed is None:
            return None
        followed.last = cluster, observed
        if followed.scraped is None:
            return None
        outcome, record = self._outcome(key, followed, cluster, observed)
        self._keep(key, followed, outcome)
        return record

    def _outcome(self, key: Key, followed: _Followed, cluster: PDCluster, observed: Observed) -> tuple[Outcome, RecordedDecision]:
        clock = Clock(self._clock(), self._now())
        seen = Seen(frozenset(followed.scraped or ()), self._waits(followed, observed, clock.now))
        facts = pool_facts(asked_of(cluster, observed), observed, seen)
        followed.leaving = frozenset[str]().union(*(each.leaving for each in facts))
        self._rounds.leave(key, followed.leaving)
        outcome = decide(cluster.spec, facts, self._rounds.windows(key), followed.memory, clock)
        return outcome, RecordedDecision(clock.wall, outcome.decision, outcome.problems)

    def _keep(self, key: Key, followed: _Followed, outcome: Outcome) -> None:
        followed.scraped, followed.memory = None, outcome.memory
        self._metrics.show(key, outcome)

    def _needs_reconcile(self, key: Key, followed: _Followed) -> bool:
        """Decide on a round; a change of status is left to a reconcile, and nothing of it is kept
        here.

        The observation of the last reconcile still holds: each event starts another one.
        """
        body = self._cache.get(PDCLUSTER.name, *key)
        if body is None or followed.last is None:
            return True
        cluster, observed = followed.last
        observed = replace(observed, status=body.get("status", {}))  # as that reconcile has left it
        outcome, record = self._outcome(key, followed, cluster, observed)
        if has_changed(cluster.spec.autoscale, replace(observed, decision=record)):
            return True
        self._keep(key, followed, outcome)
        return False

    async def run(self) -> None:
        """Begin every round when it is due; one of a PDCluster at a time."""
        async with self._scraper, asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                now = self._clock()
                for key, followed in self._followed.items():
                    if not followed.in_round and followed.next_at <= now:
                        followed.in_round = True
                        followed.next_at = max(followed.next_at + followed.spec.interval_seconds, now)
                        group.create_task(self._round(key, followed))
                await self._sleep()

    async def _sleep(self) -> None:
        times = [each.next_at for each in self._followed.values() if not each.in_round]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(times) - self._clock() if times else None):
                await self._wake.wait()

    async def _round(self, key: Key, followed: _Followed) -> None:
        try:
            targets = self._targets(key, followed.leaving)
            await self._rounds.run(key, targets, followed.spec.stale_after)
            if self._followed.get(key) is followed:
                followed.scraped = tuple(target.pod for target in targets)
                if self._needs_reconcile(key, followed):
                    self._add(key)
        except Exception:  # of one cluster: the others go on, and so does its next round
            logger.exception("round of scrapes failed key=%s", key)
        finally:
            followed.in_round = False
            if key not in self._followed:  # forgotten before its first round began
                self._rounds.forget(key)
            self._wake.set()

    def _targets(self, key: Key, leaving: frozenset[str]) -> Sequence[Target]:
        body = self._cache.get(PDCLUSTER.name, *key)
        if body is None:
            return ()
        live = Live(body, self._cache.children(key))
        service = live.own("Service").get(key.name)
        revision = None if service is None else service["spec"].get("selector", {}).get(labels.REVISION)
        return [
            Target(key, workload.role, workload.pool, pod["metadata"]["name"], address_of(str(pod["status"]["podIP"]), self._port))
            for workload, pod in ready_workers(live, revision, leaving)
            if pod["status"].get("podIP")
        ]

    @staticmethod
    def _waits(followed: _Followed, observed: Observed, now: float) -> Mapping[str, float]:
        pods = {pod.name for state in observed.workloads for pod in state.pods if is_unschedulable(pod)}
        followed.waiting = {name: followed.waiting.get(name, now) for name in pods}
        return {name: now - since for name, since in followed.waiting.items()}


def address_of(host: str, port: int) -> str:
    """`host:port`, as an address is written.

    >>> address_of("10.0.0.1", 8000), address_of("fd00::1", 8000)
    ('10.0.0.1:8000', '[fd00::1]:8000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
