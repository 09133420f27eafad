"""The operator process: settings, probes, leadership, then watches and queue until a signal. Exit
codes: 0 after SIGTERM, 1 after a lost Lease or an ended watch, 2 for wrong settings.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)

from pdcluster_api.apiserver.client import ApiClient, ClientLimits
from pdcluster_api.apiserver.connection import MAX_CONNECTIONS, ApiConnection, ApiMetrics, connect
from pdcluster_api.errors import OperatorError, StartError
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.controller import Controller, ControllerSettings
from pdcluster_operator.kopf_watch import Watch, WatchSettings, run_watches
from pdcluster_operator.lease import LeaseThread
from pdcluster_operator.settings import Settings, start_logging

# A page of StatefulSets is some megabytes once it is parsed; memory counts for more than the number
# of requests
LIMITS = ClientLimits(page=100)

WATCH_CONNECTIONS = 0  # No bound: each watch keeps one, of each kind in each namespace

# Well below the time after which an unrenewed Lease is lost
LEASE_LIMITS = ClientLimits(timeout_seconds=3.0, tries=2)

# Buffer of each TLS connection for what it reads; asyncio's own 256 KiB are 7 MiB for some thirty
# connections
TLS_BUFFER_BYTES = 2**16

STOP_SECONDS = 10.0
logger = logging.getLogger("pdcluster_operator")


def main() -> None:
    try:
        settings = Settings.from_environment(os.environ)
        start_logging(settings.log_level, settings.log_format)
        # what is imported stays, and to look for garbage in it would stop everything for 30 ms each
        # time
        gc.freeze()
        SSLProtocol.max_size = TLS_BUFFER_BYTES
        sys.exit(asyncio.run(_run(settings)))
    except StartError as e:
        for line in str(e).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(e.exit_code)
    except OperatorError as e:  # the API server refused what everything else needs
        logger.error("ended: %s", e)
        sys.exit(1)


async def _run(settings: Settings) -> int:
    stop = asyncio.Event()
    take_signals(stop)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = ApiMetrics(registry)
    async with (
        ApiClient(await _connect(settings), metrics, LIMITS) as client,
        ApiClient(await _connect(settings, WATCH_CONNECTIONS), metrics) as watching,
    ):
        site = RenderSettings(
            settings.worker_image,
            settings.etcd_image,
            settings.namespace,
            settings.cluster_domain,
            settings.server_image,
        )
        controller_settings = ControllerSettings(
            site,
            settings.identity,
            settings.watch_namespaces or (None,),
            settings.resync_seconds,
            settings.watch_silence_seconds,
            settings.concurrency,
            is_in_pod=settings.kubeconfig is None,
            delete_lost_pods=settings.delete_lost_pods,
        )
        controller = Controller(client, watching, controller_settings, registry)
        process = Process(settings, controller, stop)
        app, port = make_app(process.unhealthy, process.unready, registry), settings.http_port
        try:
            runner, port = await serve(app, port)
        except OSError as e:
            raise StartError(
                f"port {port} cannot be listened on: {e.strerror or e}; set PDCLUSTER_HTTP_PORT "
                "to a free one",
                exit_code=2,
            ) from e
        logger.info("started identity=%s http_port=%d", settings.identity, port)
        try:
            return await process.run(partial(_lease_client, settings, metrics))
        finally:
            await runner.cleanup()


async def _connect(settings: Settings, connections: int = MAX_CONNECTIONS) -> ApiConnection:
    """Connect without proxies: kopf's watch uses none either."""
    return await connect(settings.kubeconfig, proxies=False, connections=connections)


async def _lease_client(settings: Settings, metrics: ApiMetrics) -> ApiClient:
    return ApiClient(await _connect(settings), metrics, LEASE_LIMITS)


@dataclass
class Process:
    """Stands by, leads, stops.  stop: set from outside to end it in peace."""

    settings: Settings
    controller: Controller
    stop: asyncio.Event
    state: Literal["starting", "standing by", "leading"] = "starting"

    def unhealthy(self) -> list[str]:
        is_working = self.state == "leading" and self.controller.is_filled
        return self.controller.problems() if is_working else []

    def unready(self) -> list[str]:
        if self.state == "leading":
            return [] if self.controller.is_filled else ["the cache is being filled"]
        return [] if self.state == "standing by" else ["starting"]

    async def run(self, connect: Callable[[], Coroutine[Any, Any, ApiClient]]) -> int:
        """Returns the exit code.  connect: makes the client for the Lease, with short timeouts."""
        if not self.settings.leader_election:
            return await self._lead(asyncio.Event().wait())
        identity = f"{self.settings.identity}-{secrets.token_hex(4)}"
        names = self.settings.namespace, self.settings.lease_name, identity
        async with LeaseThread(connect, *names) as leadership:
            self.state = "standing by"
            if not await self._before_stop(leadership.acquire()):
                return 0
            try:
                return await self._lead(leadership.hold())
            finally:
                await leadership.release()

    async def _lead(self, lost: Coroutine[Any, Any, Any]) -> int:
        """Work until a stop signal (0), or until leadership or a needed part is lost (1)."""
        self.state = "leading"
        self.controller.metrics.is_leader.set(1)
        losing = asyncio.create_task(lost, name="leadership")
        working = asyncio.create_task(self._work(), name="work")
        try:
            await asyncio.wait({losing, working}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else 1
        finally:
            self.controller.metrics.is_leader.set(0)
            await _cancel(losing, working)

    async def _work(self) -> int:
        if not await self._before_stop(self.controller.fill()):
            return 0
        logger.info("filled the cache objects=%d", len(self.controller.cache))
        stop_watches, started = asyncio.Event(), asyncio.Event()
        working = asyncio.create_task(self.controller.run(), name="reconciles")
        await asyncio.sleep(0)  # kopf ends every task that is younger than itself
        watching = asyncio.create_task(self._watch(stop_watches, started), name="watches")
        restoring = asyncio.create_task(self._take_signals_back(started), name="signals")
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait(
                {working, watching, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            self.controller.stop()
            await asyncio.wait({working}, timeout=STOP_SECONDS)
            stop_watches.set()
            await asyncio.wait({watching}, timeout=STOP_SECONDS)
        finally:
            await _cancel(working, watching, restoring, stopping)
        return 0 if self.stop.is_set() else _report(done)

    async def _watch(self, stop: asyncio.Event, started: asyncio.Event) -> None:
        watch = Watch(
            self.controller.cache, self.controller.add_cluster, self.controller.resync_soon
        )
        settings = WatchSettings(
            self.settings.watch_namespaces,
            self.settings.kubeconfig is None,
            self.settings.watch_silence_seconds,
        )
        await run_watches(settings, watch, stop, started)

    async def _take_signals_back(self, started: asyncio.Event) -> None:
        """From kopf, which would end before the reconciles have."""
        await started.wait()
        take_signals(self.stop)

    async def _before_stop(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Do the work unless stopped; returns whether it was done.  Raises errors of the work."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            stopping.cancel()
            working.result()
            return True
        await _cancel(working)
        return False


def take_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report(ended: Iterable[asyncio.Task[Any]]) -> int:
    for task in ended:
        error = None if task.cancelled() else task.exception()
        logger.error("ended unexpectedly task=%s", task.get_name(), exc_info=error)
    return 1


# Function that returns the problems, a sentence each; empty = none
Problems = Callable[[], list[str]]


def make_app(
    unhealthy: Problems, unready: Problems, registry: CollectorRegistry
) -> web.Application:
    async def healthz(request: web.Request) -> web.Response:
        return _answer(unhealthy())

    async def readyz(request: web.Request) -> web.Response:
        return _answer(unready())

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    return app


async def serve(app: web.Application, port: int) -> tuple[web.AppRunner, int]:
    """Listen on all addresses, of both families; returns the runner, to be cleaned up, and the
    port.  With port 0 each family gets one of its own, and that of IPv4 is returned. Raises OSError
    when the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner, int(min(runner.addresses, key=len)[1])  # an address of IPv6 has four parts


def _answer(problems: list[str]) -> web.Response:
    return web.Response(status=503 if problems else 200, text="\n".join(problems or ["ok"]) + "\n")
