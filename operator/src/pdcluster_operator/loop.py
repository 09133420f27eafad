"""Parts that the leader runs, put together: cache, queue and runners, resync, etcd checks."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.kinds import POD_MONITOR, PROMETHEUS_RULE, Kind
from pdcluster_api.manifests.objects import HTTP_PORT
from pdcluster_api.manifests.render import Capabilities, Site
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.informer.listing import Listing
from pdcluster_operator.queue.progress import Progress
from pdcluster_operator.queue.resync import GRACE_SECONDS, Resync
from pdcluster_operator.queue.runner import Done, QueueRunner
from pdcluster_operator.reconcile.act import Actor
from pdcluster_operator.reconcile.asking import Asking
from pdcluster_operator.reconcile.autoscaling import Autoscaling, Scaling
from pdcluster_operator.reconcile.discovery import EtcdCheck, first_answer_slots
from pdcluster_operator.reconcile.key_secret import KeySecret
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics, LoopMetrics
from pdcluster_operator.reconcile.pod_faults import FailedCreates, PodFaults
from pdcluster_operator.reconcile.reconciler import Reconciler
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.reconcile.worker_records import WorkerRecordsPoller, read_slots
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.scraper import Scraper
from pdcluster_operator.scrape.windows import Windows
from pdcluster_operator.writes.events import Events

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
        asking = Asking(client)
        self._scraper = Scraper()
        scrapes = ScrapeMetrics(registry, self._windows, time.monotonic)
        scaling = Scaling(self.cache, self._scraper, scrapes, AutoscaleMetrics(registry), settings.worker_port)
        self._sessions = Sessions(session_maker(client, asking, scaling, self.add))
        actor = Actor(client, self.cache, settings.site, asking, Events(client, settings.identity), self._capabilities)
        self._reconciler = Reconciler(actor, self._sessions, KeySecret(client), self.metrics)
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
            "questions to etcd": self._sessions.run(),
        }
        async with self._scraper:
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

    def _windows(self) -> Iterator[Windows]:
        for session in self._sessions:
            if session.autoscaling.windows is not None:
                yield session.autoscaling.windows


def session_maker(client: ApiClient, asking: Asking, scaling: Scaling, enqueue: Callable[[Key], None]) -> Callable[[Key], Session]:
    """Make sessions of PDClusters, with what they all share."""
    events, first_answers, reads = FailedCreates(client), first_answer_slots(), read_slots()

    def make(key: Key) -> Session:
        enqueue_it = partial(enqueue, key)
        return Session(
            etcd=EtcdCheck(asking.ask, enqueue_it, first_answers),
            worker_records=WorkerRecordsPoller(key, asking, enqueue_it, reads),
            pod_faults=PodFaults(events),
            autoscaling=Autoscaling(key, scaling, enqueue_it),
        )

    return make
