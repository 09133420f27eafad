"""One round of one cluster: scrape its workers, update the windows, count, return the changes."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set

from prometheus_client import CollectorRegistry

from pdcluster_operator.plan.autoscale.values import PoolKey, Sample
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.scraper import Scraper
from pdcluster_operator.scrape.values import ClusterKey, Miss, Target
from pdcluster_operator.scrape.windows import Windows

logger = logging.getLogger(__name__)


class Rounds:
    """All clusters of the process.  One round of a cluster at a time; `clock` is the scraper's."""

    def __init__(self, scraper: Scraper, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._scraper = scraper
        self._clock = clock
        self._windows = Windows()
        self._metrics = ScrapeMetrics(registry, self._windows, clock)
        self._clusters: set[ClusterKey] = set()

    async def run(self, cluster: ClusterKey, targets: Sequence[Target], stale_after: int) -> None:
        """Scrape the cluster's ready workers once; targets that are no longer named are forgotten.

        Cancelled, it leaves the windows as they were.
        """
        self._clusters.add(cluster)
        answers = await self._scraper.scrape(targets)
        if cluster not in self._clusters:  # forgotten meanwhile: nothing of it may come back
            return
        before = self._windows.stale(cluster).keys() & {target.pod for target in targets}
        self._windows.add(cluster, self._clock(), answers, stale_after)
        self._metrics.count(answers)
        _log_changes(cluster, before, self._windows.stale(cluster))

    def leave(self, cluster: ClusterKey, pods: Collection[str]) -> None:
        """Exactly these pods are on their way out: of what they say only the queue is exported."""
        self._windows.leave(cluster, pods)

    def windows(self, cluster: ClusterKey) -> dict[PoolKey, tuple[Sample, ...]]:
        """The last rounds of each pool, the oldest first."""
        return self._windows.of(cluster)

    def stale(self, cluster: ClusterKey) -> dict[str, Miss]:
        """Reason by pod, for those that are stale."""
        return self._windows.stale(cluster)

    def forget(self, cluster: ClusterKey) -> None:
        """The cluster is gone, or no longer scaled by metrics: drop all that is known of it."""
        self._clusters.discard(cluster)
        self._windows.forget(cluster)
        self._metrics.forget(cluster)

    @property
    def clusters(self) -> frozenset[ClusterKey]:
        """Those with a round that were not forgotten since."""
        return frozenset(self._clusters)


def _log_changes(cluster: ClusterKey, before: Set[str], after: Mapping[str, Miss]) -> None:
    name = "/".join(cluster)
    for pod, miss in after.items():
        if pod not in before:
            logger.warning("worker stale cluster=%s pod=%s reason=%s: %s", name, pod, miss.reason, miss.message)
    for pod in sorted(before - after.keys()):
        logger.info("worker no longer stale cluster=%s pod=%s", name, pod)
