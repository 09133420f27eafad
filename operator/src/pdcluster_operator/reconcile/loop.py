"""What the leader runs: the cache, the queue with its workers, the resync and the questions to etcd, put together."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pdcluster_operator.cluster.cache import Cache, Key
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.events import Events
from pdcluster_operator.cluster.kinds import POD_MONITOR, PROMETHEUS_RULE
from pdcluster_operator.cluster.listing import Listing
from pdcluster_operator.manifests.render import Capabilities, Site
from pdcluster_operator.reconcile.asking import Asking
from pdcluster_operator.reconcile.discovery import Discovery
from pdcluster_operator.reconcile.metrics import LoopMetrics
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.progress import Progress
from pdcluster_operator.reconcile.reconciler import Reconciler
from pdcluster_operator.reconcile.resync import GRACE_SECONDS, Resync
from pdcluster_operator.reconcile.workers import Done, Workers


@dataclass(frozen=True)
class LoopSettings:
    """namespaces: None in it = all; identity: this process, as events name it."""

    site: Site
    identity: str
    namespaces: Sequence[str | None] = (None,)
    resync_seconds: float = 300.0
    concurrency: int = 4


class Loop:
    """One for the life of the process; `fill` first, then `run`."""

    def __init__(self, client: ApiClient, settings: LoopSettings, registry: CollectorRegistry) -> None:
        self.cache = Cache()
        self.metrics = LoopMetrics(registry)
        self.is_filled = False
        self._listing = Listing(client, settings.namespaces)
        self._progress = Progress(settings.resync_seconds, time.monotonic())
        self._workers = Workers(self._work, self.metrics.reconcile_errors.inc, settings.concurrency)
        self._resync = Resync(self._listing, self.cache, self.add, self._progress, min(GRACE_SECONDS, settings.resync_seconds))
        asking = Asking(client)
        self._discovery = Discovery(asking.ask, self.add)
        self._reconciler = Reconciler(
            client=client,
            cache=self.cache,
            site=settings.site,
            asking=asking,
            discovery=self._discovery,
            pod_faults=PodFaults(client),
            events=Events(client, settings.identity),
            capabilities=self._capabilities,
            on_ready=self._count_ready,
        )
        self._ready: dict[Key, str] = {}
        self.metrics.queue_depth.set_function(lambda: self._workers.queue.depth)

    async def fill(self) -> None:
        """Fill the cache; every PDCluster is due then."""
        await self._resync.fill()
        self.is_filled = True
        for key in self.cache.clusters():
            self.add(key)

    async def run(self) -> None:
        """Work until `stop`; the keys in work are finished first."""
        helpers = [asyncio.create_task(self._resync.run()), asyncio.create_task(self._discovery.run())]
        try:
            await self._workers.run()
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def stop(self) -> None:
        """Take no further key."""
        self._workers.stop()

    def add(self, key: Key) -> None:
        """Make a PDCluster due."""
        self._workers.add(key)

    def resync_soon(self) -> None:
        """Something may have been missed, or kinds have come or gone."""
        self._resync.request()

    def problems(self) -> list[str]:
        """What stands still; empty = nothing."""
        return self._progress.problems(self._workers.queue, time.monotonic())

    async def _work(self, key: Key) -> Done:
        with self.metrics.reconcile_seconds.time():
            return await self._reconciler.reconcile(key)

    def _capabilities(self) -> Capabilities:
        present = self._listing.present
        return Capabilities(pod_monitor=POD_MONITOR.name in present, prometheus_rule=PROMETHEUS_RULE.name in present)

    def _count_ready(self, key: Key, ready: str | None) -> None:
        if ready is None:
            self._ready.pop(key, None)
        else:
            self._ready[key] = ready
        counts = Counter(self._ready.values())
        for value in ("True", "False", "Unknown"):
            self.metrics.pdclusters.labels(value).set(counts[value])
