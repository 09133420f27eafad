"""One round of one cluster: scrape its workers, update the windows, count, log the changes."""

import logging
from collections.abc import Mapping, Sequence, Set

from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.scraper import Scraper
from pdcluster_operator.scrape.values import ClusterKey, Miss, ScrapeTarget
from pdcluster_operator.scrape.windows import Windows

logger = logging.getLogger(__name__)


async def scrape_round(
    scraper: Scraper,
    metrics: ScrapeMetrics,
    windows: Windows,
    targets: Sequence[ScrapeTarget],
    stale_after: int,
) -> None:
    """Scrape a cluster's ready workers once; targets that are no longer named are forgotten.

    One round of a cluster at a time.  Cancelled, it leaves the windows as they were.
    """
    results = await scraper.scrape(targets)
    before = windows.stale().keys() & {target.pod for target in targets}
    windows.add(scraper.clock(), results, stale_after)
    metrics.count(results)
    _log_changes(windows.cluster, before, windows.stale())


def _log_changes(cluster: ClusterKey, before: Set[str], after: Mapping[str, Miss]) -> None:
    name = "/".join(cluster)
    for pod, miss in after.items():
        if pod not in before:
            logger.warning(
                "worker stale cluster=%s pod=%s reason=%s: %s", name, pod, miss.reason, miss.message
            )
    for pod in sorted(before - after.keys()):
        logger.info("worker no longer stale cluster=%s pod=%s", name, pod)
