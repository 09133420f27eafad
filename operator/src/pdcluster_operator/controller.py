"""Parts that the leader runs, put together: cache, queue and runners, resync, sessions."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.discovery.verifier import Verifier
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.informer.watches import SILENCE_SECONDS, ObjectLister, Watches
from pdcluster_operator.queue.resync import GRACE_SECONDS, QueueHealth, Resync
from pdcluster_operator.queue.work_queue import Done, QueueRunner
from pdcluster_operator.reconcile.apply_plan import PlanApplier
from pdcluster_operator.reconcile.autoscaling import Autoscaling, Scaling
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests
from pdcluster_operator.reconcile.etcd_view import EtcdView, ReadLimits
from pdcluster_operator.reconcile.lost_pods import LostPods
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics, ControllerMetrics
from pdcluster_operator.reconcile.pod_faults import FailedCreates, PodFaults
from pdcluster_operator.reconcile.reconciler import Reconciler
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.reconcile.statuses import EventRecorder
from pdcluster_operator.reconcile.verification import VerificationContext, VerificationRunner
from pdcluster_operator.scrape.scraper import ScrapeMetrics, Scraper
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema.ports import HTTP_PORT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerSettings:
    """namespaces: None in it = all; identity: of this process, in events; worker_port: of
    `/metrics`; is_in_pod: what is on its loopback is the operator's own, and no etcd of a user.
    """

    site: RenderSettings
    identity: str
    namespaces: Sequence[str | None] = (None,)
    resync_seconds: float = 300.0
    watch_silence_seconds: float = SILENCE_SECONDS
    concurrency: int = 4
    worker_port: int = HTTP_PORT
    is_in_pod: bool = True
    delete_lost_pods: bool = False


class Controller:
    """One for the life of the process; `fill` first, then `run`.

    watching: the client of the watches, without a bound on its connections
    """

    def __init__(
        self,
        client: ApiClient,
        watching: ApiClient,
        settings: ControllerSettings,
        registry: CollectorRegistry,
    ) -> None:
        self.cache = Cache()
        self.metrics = ControllerMetrics(registry)
        self.is_filled = False
        self._progress = QueueHealth(settings.resync_seconds, time.monotonic())
        on_error = self.metrics.reconcile_errors.inc
        self._runner = QueueRunner(self._work, on_error, settings.concurrency)
        listing = ObjectLister(client, settings.namespaces)
        grace_seconds = min(GRACE_SECONDS, settings.resync_seconds)
        self._resync = Resync(listing, self.cache, self.add, self._progress, grace_seconds)
        silence_seconds = settings.watch_silence_seconds
        self._watches = Watches(watching, listing, self.cache, self.add, silence_seconds)
        etcd = EtcdRequests(client, may_be_loopback=not settings.is_in_pod)
        self._scraper = Scraper()
        scrapes = ScrapeMetrics(registry, self._windows, time.monotonic)
        scaling = Scaling(
            self.cache, self._scraper, scrapes, AutoscaleMetrics(registry), settings.worker_port
        )
        verification = VerificationContext(Verifier())
        failed_creates, limits = FailedCreates(client), ReadLimits()

        def make_session(key: Key) -> Session:
            enqueue = partial(self.add, key)
            return Session(
                etcd=EtcdView(etcd, enqueue, limits),
                pod_faults=PodFaults(failed_creates),
                autoscaling=Autoscaling(key, scaling, enqueue),
                verification=VerificationRunner(verification, enqueue),
            )

        self._sessions = Sessions(make_session)
        events = EventRecorder(client, settings.identity)
        applier = PlanApplier(client, self.cache, settings.site, etcd, gate=self._runner.gate)
        self._reconciler = Reconciler(
            applier,
            self._sessions,
            events,
            self.metrics,
            LostPods(client, settings.delete_lost_pods),
        )
        self.metrics.queue_depth.set_function(lambda: self._runner.queue.depth)

    async def fill(self) -> None:
        await self._resync.fill()
        self.is_filled = True
        for key in self.cache.clusters():
            self.add(key)

    async def run(self) -> None:
        """Work until `stop`; keys in work are finished first.  Raises what ends a part."""
        parts = {
            "reconciles": self._runner.run(),
            "watches": self._watches.run(),
            "resync": self._resync.run(),
            "reads of etcd": self._sessions.run(),
        }
        async with self._scraper:
            tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if tasks[0] not in done:
                    names = ", ".join(task.get_name() for task in done)
                    raise RuntimeError(f"ended without a stop: {names}")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._runner.stop()

    def add(self, key: Key) -> None:
        self._runner.add(key)

    def add_cluster(self, key: Key) -> None:
        """Reconcile a PDCluster that has changed, and those whose service.models name it."""
        for each in (key, *self._sessions.naming(key)):
            self.add(each)

    def resync_soon(self) -> None:
        self._resync.request()

    def problems(self) -> list[str]:
        return self._progress.problems(self._runner.queue, time.monotonic())

    async def _work(self, key: Key) -> Done:
        started = time.monotonic()
        with self.metrics.reconcile_seconds.time():
            done = await self._reconciler.reconcile(key)
        seconds = time.monotonic() - started
        logger.debug("reconcile ended key=%s wrote=%s seconds=%.6f", key, done.wrote, seconds)
        return done

    def _windows(self) -> Iterator[Windows]:
        for session in self._sessions:
            if session.autoscaling.windows is not None:
                yield session.autoscaling.windows
