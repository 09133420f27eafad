"""The server process next to started engine processes; ends with them.

Order: HTTP (probes are answered), `dtype: auto` by etcd, engines, gRPC, etcd.  Exit status: 0 after
SIGTERM or SIGINT and the last request; if the engine dies 2 wrong settings, 3 no device, else 1.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pdcluster_schema.etcd_keys import dtype_key
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import Identity, Role, WorkerConfig, requested_device
from pdcluster_worker.errors import NO_DEVICE, WRONG_SETTING, ConfigError, DeviceError, WorkerError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.etcd import agreed_dtype
from pdcluster_worker.processes.lifecycle import (
    HTTP_DRAIN_SECONDS,
    WatchedFiles,
    leave,
    open_files,
    serve_http,
    settle_memory,
    signals,
    unless,
)
from pdcluster_worker.server.http.run import HttpServer
from pdcluster_worker.server.state_routes import engine_health_route
from pdcluster_worker.serving.backend import WorkerBackend, restart_reason
from pdcluster_worker.serving.engine_monitor import EngineMonitor
from pdcluster_worker.serving.engines.child import END_SECONDS
from pdcluster_worker.serving.engines.client import EngineDiedError
from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.engines.group import Child, EngineGroup
from pdcluster_worker.serving.engines.headless_listener import HeadlessListener
from pdcluster_worker.serving.engines.metrics import EngineMetrics
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.stock_engine.front_end import StockFrontEnd
from pdcluster_worker.stock_engine.http import StockClient
from pdcluster_worker.system.native_dtype import DType, dtype_of_device, log_speed
from pdcluster_worker.system.nvidia import Gpus, GpuUse, read_report
from pdcluster_worker.tracing.otel import close_tracing, start_tracing
from pdcluster_worker.tracing.request_trace import RecentTraces

logger = logging.getLogger(__name__)

SERVER_NICENESS = 10  # below its engine's priority: the engine was 14 % faster on two cores

JOIN_POLL_SECONDS = 0.2

# most looks for decode workers of a worker that has another role: longer than a handshake may take
REACH_POLLS = 25

# by the exit status of an engine process
_REFUSALS: dict[int, type[WorkerError]] = {WRONG_SETTING: ConfigError, NO_DEVICE: DeviceError}

# longest wait, after an engine was killed, for answers of peers through this worker
RELAYED_SECONDS = 60.0


async def run(
    config: WorkerConfig, identity: Identity, policy_path: Path | None, group: EngineGroup
) -> int:
    """Returns the exit status.  Raises ConfigError, DeviceError, ModelError."""
    files = open_files(config, policy_path)
    try:
        return await ServerProcess(config, identity, files, group).run()
    except EngineDiedError as e:
        # the last line of the log: Kubernetes shows it as the container's last words
        logger.error("%s", e)
        return 1


class ServerProcess:
    def __init__(
        self, config: WorkerConfig, identity: Identity, files: WatchedFiles, group: EngineGroup
    ) -> None:
        self._config = config
        self._identity = identity
        self._files = files
        self._group = group
        self._metrics = Metrics()
        self._traces = RecentTraces()
        self._tracing = start_tracing(self._traces, config, identity)
        self._engine_metrics = EngineMetrics(self._metrics, time.monotonic)
        self._backend = WorkerBackend(
            config.model.name,
            group.engines,
            config.model.adapters,
            may_compile=config.engine.type != "pdcluster",
            loads_adapters=config.model.runtime_adapters is not None,
        )
        self._ending: list[asyncio.Task[None]] = []  # runtimes of former roles
        group.report_children(self._watch)

    async def run(self) -> int:
        group, backend = self._group, self._backend
        stop, hurry = signals()
        routes = []
        if self._config.engine.type != "pdcluster":
            seconds = self._config.engine.vllm.startup_timeout_seconds
            routes = [engine_health_route(restart_reason(backend, time.monotonic, seconds))]
        http = await serve_http(
            self._config, backend, self._files, self._metrics, self._traces, *routes
        )
        try:
            life = asyncio.create_task(self._live(group, backend, http, stop))
            hurried = asyncio.create_task(hurry.wait())
            ends: set[asyncio.Future[Any]] = {life, group.ended, hurried}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if group.ended.done() and group.ended.result().killed.done():
                await _let_relayed_end(http, hurried)
            # Cancelled, it still revokes the etcd lease.
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineDiedError):
                await life
            if (failed := group.failed) is not None:
                await _engine_end(failed)
            return 0 if stop.is_set() else 1
        finally:
            await http.close()
            await close_tracing(self._tracing)

    def _watch(self, child: Child) -> None:
        self._engine_metrics.forget(child.rank, for_good=False)  # a new process counts from 0
        child.client.on_stats.append(lambda stats: self._engine_metrics.update(stats, child.rank))
        child.client.on_wait = self._backend.wait

    async def _dtype(self, backend: WorkerBackend) -> DType:
        """The model's setting; for `auto` the one that the revision has agreed on."""
        config, loading = self._config, backend.waits_for
        if config.engine.type != "pdcluster":
            return "float32"  # unused: vLLM's command sets its dtype
        kind = requested_device(config).kind
        native = dtype_of_device(kind)
        dtype = config.model.dtype
        if dtype == "auto":
            key = dtype_key(self._identity.namespace, config.cluster, config.revision)

            def report(problem: str) -> None:
                backend.waits_for = problem

            dtype = await agreed_dtype(config.discovery, key, native, report)
            backend.waits_for = loading
        log_speed(dtype, native, kind)
        is_native = dtype in (native, "float32")
        self._metrics.engine_dtype_info.labels(dtype, str(is_native).lower()).set(1)
        return dtype

    def _occupancy(self, gpu: Callable[[], GpuUse | None] | None) -> tuple[float, float]:
        """By the GPU's driver, else by the engines' steps."""
        use = gpu() if gpu is not None else None
        if use is None or use.busy is None:
            return self._engine_metrics.busy_ratio(), 0.0
        return use.busy, use.memory_busy

    async def _live(
        self, group: EngineGroup, backend: WorkerBackend, http: HttpServer, stop: asyncio.Event
    ) -> None:
        dtype = await unless(stop, self._dtype(backend))
        if dtype is None:
            return
        group.begin(dtype)
        # Engines run on every core: a server process that takes one in the middle of a step holds
        # up all its threads.
        # an engine that is started again would inherit it
        if self._config.engine.data_parallel_size == 1:
            os.nice(SERVER_NICENESS)
        engines = await unless(stop, group.ready())
        if engines is None:
            return
        backend.engines_are_ready()
        facts = engines.first.facts
        if self._config.engine.type != "pdcluster":
            self._metrics.engine_dtype_info.labels(facts.dtype, "true").set(1)
        self._metrics.engine_device_info.labels(facts.device.kind, facts.device.name).set(1)
        self._metrics.engine_scheduler_info.labels(facts.scheduler, facts.scheduling_policy).set(1)
        gpu = gpu_use(self._config.engine, facts.device)
        if gpu is not None:
            self._metrics.watch_gpu(facts.device, gpu)
        begin = partial(self._begin_role, http=http, stop=stop, gpu=gpu)
        begin(self._config.role)
        watching = self._files.watch(lambda policy: self._runtime.set_policy(policy))
        listener = HeadlessListener(self._config, dtype, group)
        try:
            if self._config.listen.head is not None:
                await listener.open(self._config.listen.head)
                await unless(stop, self._all_joined(backend))
            await self._runtime.join(http.port)
            backend.serve(self._runtime)
            settle_memory()
            while (role := await unless(stop, self._runtime.next_role())) is not None:
                old = self._runtime
                await self._end_role(old)
                begin(role)
                await self._runtime.join(http.port)
                await _reach_decodes(self._runtime)
                backend.serve(self._runtime)
                self._metrics.role_changes.labels(role).inc()
                self._ending.append(asyncio.create_task(_close(old), name="former role"))
            group.leave()
            await leave(self._runtime, http)
        finally:
            for task in (*watching, *self._ending):
                task.cancel()
            await listener.close()
            self._monitor.close()
            await self._runtime.close()

    def _begin_role(
        self,
        role: Role,
        *,
        http: HttpServer,
        stop: asyncio.Event,
        gpu: Callable[[], GpuUse | None] | None,
    ) -> None:
        """A runtime for it, which has not joined yet."""
        config, engines = self._config, self._group.engines
        policy = self._files.policy.current
        worker = WorkerContext(role, engines, self._metrics, policy, traces=self._traces)
        worker.occupancy = lambda: self._occupancy(gpu)
        if config.model.frontend == "engine":
            worker.front_end = StockFrontEnd(
                StockClient(config.engine.vllm.port), engines.first.client.count_embeddings
            )
        runtime = WorkerRuntime(
            config, self._identity, self._files.credentials, worker, http.unacked
        )
        runtime.view.conditions = self._files.conditions.current
        self._runtime = runtime
        self._monitor = EngineMonitor(worker, runtime.on_stall, stop.is_set, self._group.kill)
        self._follow(self._group, self._monitor, worker)

    async def _end_role(self, runtime: WorkerRuntime) -> None:
        """Clients' requests that come meanwhile still go to decode workers."""
        await runtime.leave_peers()
        self._monitor.close()
        runtime.worker.close()

    async def _all_joined(self, backend: WorkerBackend) -> None:
        """Wait for the engines of the worker's other pods, so that it starts as a whole."""
        own, number = self._config.engine.data_parallel_size, self._config.listen.headless
        while (joined := sum(each.rank >= own for each in self._group.engines)) < number:
            backend.waits_for = (
                f"{number - joined} of {number} headless engines have not joined yet"
            )
            await asyncio.sleep(JOIN_POLL_SECONDS)

    def _follow(self, group: EngineGroup, monitor: EngineMonitor, worker: WorkerContext) -> None:
        """Monitor each engine while it lives."""

        def on_start(engine: Engine, is_again: bool) -> None:
            self._metrics.engine_restarts.labels(str(engine.rank)).inc(int(is_again))
            if engine.rank >= self._config.engine.data_parallel_size:
                engine.client.on_stats.append(
                    lambda stats: self._engine_metrics.update(stats, engine.rank)
                )
            monitor.start(engine)
            worker.engines_changed()

        def on_end(engine: Engine) -> None:
            self._engine_metrics.forget(
                engine.rank, for_good=engine.rank >= self._config.engine.data_parallel_size
            )
            monitor.end(engine)
            worker.engines_changed()

        def on_forget(engine: Engine) -> None:
            self._metrics.engine_up.remove(str(engine.rank))
            worker.engines_changed()

        group.on_start, group.on_end, group.on_forget = on_start, on_end, on_forget
        for engine in group.engines:
            monitor.start(engine)


def gpu_use(engine: EngineConfig, device: DeviceFacts) -> Callable[[], GpuUse | None] | None:
    """Utilization of the engine's GPUs; None for a CPU."""
    if device.kind != "cuda":
        return None
    if engine.type != "pdcluster" and not engine.vllm.command:
        return lambda: read_report().use()
    return Gpus(engine.num_ranks).use


async def _reach_decodes(runtime: WorkerRuntime) -> None:
    """Wait a moment for a worker that takes the requests of clients which this one does not."""
    for _ in range(REACH_POLLS):
        if not runtime.ingress or runtime.worker.takes_new or runtime.decodes():
            return
        await asyncio.sleep(JOIN_POLL_SECONDS)


async def _close(old: WorkerRuntime) -> None:
    """Wait for the requests that it passes on."""
    while True:
        await asyncio.sleep(JOIN_POLL_SECONDS)
        if not old.worker.active:
            await old.close()
            return


async def _let_relayed_end(http: HttpServer, hurried: asyncio.Future[Any]) -> None:
    """Refuse connections, and wait up to RELAYED_SECONDS for answers that come from peers."""

    async def end() -> None:
        http.refuse()
        while not await http.has_finished(HTTP_DRAIN_SECONDS) and http.num_answering:
            pass

    ending = asyncio.create_task(end())
    await asyncio.wait(
        {ending, hurried}, timeout=RELAYED_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    ending.cancel()


async def _engine_end(engine: Child) -> NoReturn:
    """Raise the engine's error: by its exit status, else EngineDiedError."""
    with contextlib.suppress(TimeoutError):  # it may hang after reporting its failure
        status = await asyncio.wait_for(asyncio.shield(engine.exit_status), END_SECONDS)
        if status in _REFUSALS:
            raise _REFUSALS[status](engine.client.died)
    raise EngineDiedError(engine.client.died or "it ended")
