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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.kinds import PDCLUSTER, POD, SERVICE
from pdcluster_api.apiserver.observe import Live, ready_workers
from pdcluster_api.manifests.objects import HTTP_PORT
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import Clock, Outcome
from pdcluster_api.plan.cluster import asked_of
from pdcluster_api.plan.observed.decision import Decision
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.sizes.pool_facts import Seen, pool_facts
from pdcluster_api.plan.status.autoscaled import has_changed
from pdcluster_api.schema import labels
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.text import address_of
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.followed import Followed
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.rounds import scrape_round
from pdcluster_operator.scrape.scraper import Scraper
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
    _followed: Followed | None = None

    @property
    def windows(self) -> Windows | None:
        """The newest numbers of its workers; None = it is not followed."""
        return None if self._followed is None else self._followed.windows

    @property
    def has_decided(self) -> bool:
        """Return whether a decision waits for a reconcile."""
        return self._followed is not None and self._followed.has_decided

    def follow(self, cluster: PDCluster, observed: Observed) -> Decision | None:
        """Scrape the workers from now on, as the spec says; with mode Off no longer.

        Returns the decision that a round has made on this state; None = there is none.
        """
        followed, now = self._followed, self.shared.clock()
        if cluster.spec.autoscale.mode == "Off":
            self.stop()
            return None
        if followed is None:
            followed = self._followed = Followed(cluster, observed, now, Windows(self.key))
            followed.task = asyncio.create_task(self._run(followed), name=f"rounds of {self.key}")
            return None
        before, followed.cluster, followed.observed = followed.spec, cluster, observed
        if followed.spec != before:
            followed.next_at = min(followed.next_at, now + followed.spec.interval_seconds)
            followed.wake.set()
        return self._take(followed)

    def stop(self) -> asyncio.Task[None] | None:
        """Forget all: the PDCluster is gone, refused, or no longer scaled by metrics.

        Returns its rounds, which are cancelled.
        """
        followed, self._followed = self._followed, None
        if followed is None or followed.task is None:
            return None
        followed.task.cancel()
        self.shared.scrapes.forget(self.key)
        self.shared.metrics.forget(self.key)
        return followed.task

    def _take(self, followed: Followed) -> Decision | None:
        outcome = followed.take()
        if outcome is None:
            return None
        self._keep(followed, outcome)
        return outcome.decision

    def _keep(self, followed: Followed, outcome: Outcome) -> None:
        self.shared.metrics.show(self.key, outcome, followed.outcome)
        followed.outcome = outcome

    def _decide(self, followed: Followed, scraped: Iterable[str]) -> bool:
        """Decide on a round; returns whether a reconcile has to write the decision.

        scraped: pods of the round
        """
        followed.drop()
        body = self.shared.cache.get(PDCLUSTER.name, *self.key)
        if body is None:
            return False
        # As the last reconcile has left it.
        observed = replace(followed.observed, status=body.get("status", {}))
        clock = Clock(self.shared.clock(), self.shared.now())
        seen = Seen(frozenset(scraped), followed.waits(observed, clock.now))
        facts = pool_facts(asked_of(followed.cluster, observed), observed, seen)
        followed.leaving = frozenset[str]().union(*(each.leaving for each in facts))
        followed.windows.leave(followed.leaving)
        windows = followed.windows.pools()
        outcome = decide(followed.cluster.spec, facts, windows, followed.memory, clock)
        if has_changed(followed.spec, replace(observed, decision=outcome.decision)):
            followed.hand(outcome, observed)
            return True
        self._keep(followed, outcome)
        return False

    async def _run(self, followed: Followed) -> None:
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

    async def _round(self, followed: Followed) -> None:
        try:
            targets = self._targets(followed.leaving)
            scraper, scrapes = self.shared.scraper, self.shared.scrapes
            await scrape_round(
                scraper, scrapes, followed.windows, targets, followed.spec.stale_after
            )
            if self._decide(followed, [target.pod for target in targets]):
                self.enqueue()
        except Exception:  # its next round goes on
            logger.exception("round of scrapes failed key=%s", self.key)

    def _targets(self, leaving: frozenset[str]) -> Sequence[Target]:
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
            Target(
                self.key,
                workload.role,
                workload.pool,
                pod["metadata"]["name"],
                address_of(str(pod["status"]["podIP"]), self.shared.port),
            )
            for workload, pod in ready_workers(live, revision, leaving)
            if pod["status"].get("podIP")
        ]
