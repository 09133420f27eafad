"""Parts that the leader runs, put together: cache, queue and runners, resync, etcd checks."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from pdcluster_operator.cluster.cache import Cache, Key
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.events import Events
from pdcluster_operator.cluster.kinds import POD_MONITOR, PROMETHEUS_RULE, Kind
from pdcluster_operator.cluster.listing import Listing
from pdcluster_operator.manifests.objects import HTTP_PORT
from pdcluster_operator.manifests.render import Capabilities, Site
from pdcluster_operator.reconcile.asking import Asking
from pdcluster_operator.reconcile.autoscaling import Autoscaling
from pdcluster_operator.reconcile.discovery import Discovery
from pdcluster_operator.reconcile.key_secret import KeySecret
from pdcluster_operator.reconcile.metrics import LoopMetrics
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.progress import Progress
from pdcluster_operator.reconcile.queue_runner import Done, QueueRunner
from pdcluster_operator.reconcile.reconciler import Reconciler
from pdcluster_operator.reconcile.resync import GRACE_SECONDS, Resync
from pdcluster_operator.reconcile.worker_records import WorkerRecordsPoller

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopSettings:
    """namespaces: None in it = all; identity: of this process, in events; worker_port: of
    `/metrics`.
    """

    site: Site
    identity: str
    namespaces: Sequence[str | None] = (None,)
    resync_seconds: float = 300.0
    concurrency: int = 4
    worker_port: int = HTTP_PORT


class Loop:
    """One for the life of the process; `fill` first, then `run`."""

    def __init__(self, client: ApiClient, settings: LoopSettings, registry: CollectorRegistry) -> None:
        self.cache = Cache()
        self.metrics = LoopMetrics(registry)
        self.is_filled = False
        self._listing = Listing(client, settings.namespaces)
        self._progress = Progress(settings.resync_seconds, time.monotonic())
        self._runner = QueueRunner(self._work, self.metrics.reconcile_errors.inc, settings.concurrency)
        self._resync = Resync(self._listing, self.cache, self.add, self._progress, min(GRACE_SECONDS, settings.resync_seconds))
        self._autoscaling = Autoscaling(self.cache, self.add, registry, port=settings.worker_port)
        asking = Asking(client)
        self._discovery = Discovery(asking.ask, self.add)
        self._worker_records = WorkerRecordsPoller(asking, self.add)
        self._reconciler = Reconciler(
            client=client,
            cache=self.cache,
            site=settings.site,
            asking=asking,
            discovery=self._discovery,
            worker_records=self._worker_records,
            pod_faults=PodFaults(client),
            key_secret=KeySecret(client),
            events=Events(client, settings.identity),
            capabilities=self._capabilities,
            autoscaling=self._autoscaling,
            on_ready=self._count_ready,
            on_cut=lambda key, number: self.metrics.drains_cut.labels(*key).inc(number),
        )
        self._ready: dict[Key, str] = {}
        self.metrics.queue_depth.set_function(lambda: self._runner.queue.depth)

    async def fill(self) -> None:
        """Fill the cache; every PDCluster is due then."""
        await self._resync.fill()
        self.is_filled = True
        for key in self.cache.clusters():
            self.add(key)

    async def run(self) -> None:
        """Work until `stop`; keys in work are finished first.

        Raises what ends a part unexpectedly.
        """
        parts = {
            "workers": self._runner.run(),
            "resync": self._resync.run(),
            "questions to etcd": self._discovery.run(),
            "records of workers": self._worker_records.run(),
            "scrapes of workers": self._autoscaling.run(),
        }
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if tasks[0] not in done:
                raise RuntimeError(f"ended without a stop: {', '.join(task.get_name() for task in done)}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Take no further key."""
        self._runner.stop()

    def add(self, key: Key) -> None:
        """Enqueue a PDCluster."""
        self._runner.add(key)

    def resync_soon(self) -> None:
        """Something may have been missed, or kinds have come or gone."""
        self._resync.request()

    @property
    def watched(self) -> tuple[Kind, ...]:
        """The kinds to watch, once the cache is filled."""
        return self._listing.watched()

    def problems(self) -> list[str]:
        """Parts that have stalled, as text; empty = none."""
        return self._progress.problems(self._runner.queue, time.monotonic())

    async def _work(self, key: Key) -> Done:
        started = time.monotonic()
        with self.metrics.reconcile_seconds.time():
            done = await self._reconciler.reconcile(key)
        logger.debug("pass ended key=%s wrote=%s seconds=%.6f", key, done.wrote, time.monotonic() - started)
        return done

    def _capabilities(self) -> Capabilities:
        present = self._listing.present
        forbidden = frozenset(kind for kind, exists in self._listing.forbidden.items() if exists)
        return Capabilities(POD_MONITOR.name in present, PROMETHEUS_RULE.name in present, forbidden)

    def _count_ready(self, key: Key, ready: str | None) -> None:
        before = self._ready.pop(key, None)
        if ready is None:
            self.metrics.drains_cut.remove_by_labels({"namespace": key.namespace, "pdcluster": key.name})
        if before is not None:
            self.metrics.pdclusters.labels(before).dec()
        if ready is not None:
            self._ready[key] = ready
            self.metrics.pdclusters.labels(ready).inc()
