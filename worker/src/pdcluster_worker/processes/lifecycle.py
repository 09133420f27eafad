"""Common parts of the server processes: watched files, signals and shutdown."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.routing import Route

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.sections import PICKER
from pdcluster_worker.config.policy import ConditionsFile, PolicyFile
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.tls import Credentials, EtcdCredentials
from pdcluster_worker.server.app import create_app, create_prefill_app
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.generation.front_end import FrontEnd
from pdcluster_worker.server.http.api_keys import ApiKeys, TenantOfKey
from pdcluster_worker.server.http.limits import limits_of
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.run import Front, HttpServer, serve
from pdcluster_worker.server.openai.engine_front_end import EngineFrontEnd
from pdcluster_worker.server.openai.own_front_end import OwnFrontEnd
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.serving.backend import RouterBackend, WorkerBackend
from pdcluster_worker.serving.draining import CHECK_SECONDS
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.tracing.request_trace import RecentTraces

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

YOUNG_OBJECTS = 25_000
"""Allocations between garbage collections: as many objects as fifty open requests have, 1 to 2 ms a
collection.  Python's 700 would scan open requests at every fourth request, a tenth of their cost.
"""

LOOK_SECONDS = 0.5  # a command may shorten the time that is left
TAKE_SECONDS = 2.0  # for clients to take the error that ends their answers

HTTP_DRAIN_SECONDS = 5.0  # for other open work, such as a body that still arrives


@dataclass(frozen=True)
class WatchedFiles:
    """Files that are re-read while the worker runs."""

    credentials: Credentials
    policy: PolicyFile
    api_keys: ApiKeys
    conditions: ConditionsFile

    @property
    def tenant_of(self) -> TenantOfKey:
        """None = no key needed."""
        return self.api_keys.tenant_of if self.api_keys.required else None

    def watch(self, on_policy: Callable[[PolicyConfig], None]) -> "list[asyncio.Task[None]]":
        """The caller cancels the tasks."""
        return [
            asyncio.create_task(self.policy.watch(on_policy), name="policy file"),
            asyncio.create_task(self.credentials.watch(), name="certificates"),
            asyncio.create_task(self.api_keys.watch(), name="API keys"),
        ]


def open_files(config: WorkerConfig, policy_path: Path | None) -> WatchedFiles:
    """Raises ConfigError."""
    files = WatchedFiles(
        Credentials(config.tls),
        PolicyFile(policy_path),
        ApiKeys(Path(config.listen.api_keys) if config.listen.api_keys else None),
        ConditionsFile(policy_path),
    )
    if config.discovery.tls is not None:
        # report wrong files before the model is loaded
        EtcdCredentials(config.discovery.tls)
    return files


async def serve_http(
    config: WorkerConfig,
    backend: WorkerBackend | RouterBackend,
    files: WatchedFiles,
    metrics: Metrics,
    traces: RecentTraces,
    *routes: Route,
    front: Front | None = None,
) -> HttpServer:
    """Serve the API of the worker's role, and `routes`.  front: see `http.run.serve`."""

    def policy() -> PolicyConfig:
        return files.policy.current

    open_answers = OpenAnswers()
    if config.role in ("prefill", PICKER):
        app = create_prefill_app(
            *(backend, metrics, policy),
            tenant_of=files.tenant_of,
            traces=traces,
            role=config.role,
        )
    else:
        model, folder = config.model, Path(config.model.path)
        front_end: FrontEnd
        if model.frontend == "engine":
            front_end, tokenizer = EngineFrontEnd(backend.ask), Tokenizer.of_engine(folder)
        else:
            front_end, tokenizer = OwnFrontEnd(), Tokenizer.load(folder, model.chat_template)
        app = create_app(
            backend,
            tokenizer,
            metrics,
            policy,
            tenant_of=files.tenant_of,
            traces=traces,
            parsers=ParserNames.of(model),
            front_end=front_end,
            open_answers=open_answers,
        )
    app.routes.extend(routes)
    return await serve(
        app,
        config.listen.http_host or config.listen.host,
        config.listen.http,
        lambda: limits_of(policy().http_limits),
        front,
        open_answers=open_answers,
    )


def settle_memory() -> None:
    """Exclude everything loaded so far from garbage collection, which would delay every request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def leave(runtime: WorkerRuntime, http: HttpServer) -> None:
    """Shutdown: finish requests, those that still come included, and send the last bytes.  Where
    that takes longer than the process has, answers end with an error.
    """
    finishing = asyncio.create_task(_finish(runtime, http), name="last requests")
    try:
        while (left := runtime.seconds_left) > 0 and not finishing.done():
            await asyncio.wait({finishing}, timeout=min(left, LOOK_SECONDS))
        if finishing.done():
            await finishing
            return
    finally:
        finishing.cancel()
    await _end_answers(runtime, http)


async def _finish(runtime: WorkerRuntime, http: HttpServer) -> None:
    await runtime.leave()
    http.refuse()
    while not await http.has_finished(HTTP_DRAIN_SECONDS) and (
        http.num_answering or not runtime.is_drained
    ):
        await runtime.leave()
    await http.close()
    await runtime.finish()


async def _end_answers(runtime: WorkerRuntime, http: HttpServer) -> None:
    """Requests of other workers' clients end with this process, and go on elsewhere."""
    number = http.open_answers.end(_no_time_left)
    logger.warning("no time left before this process is killed, answers ended=%d", number)
    http.refuse()
    await http.has_finished(TAKE_SECONDS / 2)
    with suppress(OSError):
        for _ in range(int(TAKE_SECONDS / 2 / CHECK_SECONDS)):
            if not await http.unacked():
                break
            await asyncio.sleep(CHECK_SECONDS)
    await http.close()
    runtime.refuse()


def _no_time_left() -> RequestError:
    message = "this worker was stopped, and has no time left for this answer: send it again"
    return RequestError(message, status=503, code="draining", retry_after_seconds=1)


async def unless(stop: asyncio.Event, step: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The step's result; None when the worker gets a signal to stop first."""
    doing, stopping = asyncio.create_task(step), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else doing.result()
    finally:
        doing.cancel()
        stopping.cancel()


def signals() -> tuple[asyncio.Event, asyncio.Event]:
    """(stop, hurry): set by the first SIGTERM or SIGINT, and by a SIGINT after it."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_interrupt() -> None:
        (hurry if stop.is_set() else stop).set()

    def on_terminate() -> None:
        logger.info("asked to end")
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    return stop, hurry
