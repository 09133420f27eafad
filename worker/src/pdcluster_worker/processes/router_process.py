"""The process of a router or a picker: HTTP, routing and peers as in every worker, without an
engine or torch.
"""

import asyncio
import contextlib
import json
import uuid
from pathlib import Path

from pdcluster_schema.kv_shape import language_config
from pdcluster_schema.ports import join_address, parse_address
from pdcluster_schema.sections import PICKER
from pdcluster_worker.config.worker import Identity, WorkerConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.processes.ext_proc_server import ExtProcServer
from pdcluster_worker.processes.lifecycle import (
    WatchedFiles,
    leave,
    open_files,
    serve_http,
    settle_memory,
    signals,
)
from pdcluster_worker.proxy.client_connection import proxy_protocol
from pdcluster_worker.proxy.endpoint_picker import EndpointPicker
from pdcluster_worker.proxy.picker import UpstreamState
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.server.http.run import HttpServer
from pdcluster_worker.serving.backend import RouterBackend
from pdcluster_worker.serving.engines.engines import Engines
from pdcluster_worker.serving.worker_context import RouterInfo, WorkerContext
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.system.process import allow_more_files
from pdcluster_worker.tracing.otel import close_tracing, start_tracing
from pdcluster_worker.tracing.request_trace import RecentTraces


async def run(config: WorkerConfig, identity: Identity, policy_path: Path | None) -> int:
    """Returns the exit status after a drain.  Raises ConfigError, ModelError."""
    allow_more_files()
    files = open_files(config, policy_path)
    is_picker = config.role == PICKER
    limits = (
        (0, 0) if is_picker else model_limits(Path(config.model.path), config.engine.max_model_len)
    )
    backend = RouterBackend(config.model.name, *limits, config.model.adapters)
    metrics, traces = Metrics(), RecentTraces()
    tracing = start_tracing(traces, config, identity)

    stop, hurry = signals()
    relay = ReverseProxy(lambda: files.policy.current, files.tenant_of, backend.draining, metrics)
    http = await serve_http(
        *(config, backend, files, metrics, traces),
        front=None if is_picker else lambda ordinary: proxy_protocol(relay, ordinary),
    )
    engineless = RouterInfo(uuid.uuid4().hex, config.engine.block_size)
    worker = WorkerContext(
        config.role, Engines(), metrics, files.policy.current, engineless=engineless, traces=traces
    )
    worker.num_relayed = lambda: relay.num_open
    http.open_answers.end_relayed = relay.end_answers
    runtime = WorkerRuntime(config, identity, files.credentials, worker, http.unacked)
    runtime.view.conditions = files.conditions.current
    front: ReverseProxy | EndpointPicker = relay
    gateways: ExtProcServer | None = None
    if is_picker:
        front = EndpointPicker(lambda: files.policy.current, worker.refusal, metrics)
        gateways = ExtProcServer(front, backend.draining)
        await gateways.start(config.listen.host, config.listen.picker, files.credentials)
    life = asyncio.create_task(
        _live(runtime, backend, http, files, stop, front=front, gateways=gateways)
    )
    hurried = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({life, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        return 0
    finally:
        hurried.cancel()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(life, return_exceptions=True)
        await http.close()
        await close_tracing(tracing)


async def _live(
    runtime: WorkerRuntime,
    backend: RouterBackend,
    http: HttpServer,
    files: WatchedFiles,
    stop: asyncio.Event,
    *,
    front: ReverseProxy | EndpointPicker,
    gateways: ExtProcServer | None,
) -> None:
    watching = [*files.watch(runtime.set_policy), asyncio.create_task(front.run(), name="front")]
    try:
        await runtime.join(http.port)
        backend.serve(runtime)
        router_polls = runtime.on_peers

        def on_peers() -> None:
            """Notify the front of changes of decode workers, after the router itself."""
            router_polls()
            front.poll()

        runtime.on_peers = on_peers
        front.workers = lambda: [
            now for peer in runtime.known_decodes() if (now := _now(peer)) is not None
        ]
        front.poll()
        settle_memory()
        await stop.wait()
        if gateways is not None:
            await gateways.close()
        await leave(runtime, http)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        front.close()
        await runtime.close()


def _now(peer: Peer) -> UpstreamState | None:
    """None with invalid addresses, the host having shown its certificate and the port being etcd's;
    and in the pod of a prefill worker, which takes no clients.
    """
    record = peer.record
    if record.pod_role is not None:
        return None
    try:
        host, _ = parse_address(record.grpc_address)
        _, port = parse_address(record.http_address)
    except ValueError:
        return None
    return UpstreamState(
        f"{record.pod} {record.engine_id}",
        record.pod,
        join_address(host, port),
        peer.ready,
        peer.load.num_requests,
        is_connected=peer.state == "ready",
        has_drained=peer.has_drained,
    )


def model_limits(folder: Path, max_model_len: int | None) -> tuple[int, int]:
    """(max_model_len, vocab_size) by config.json and the setting.  The second is 0 where it is not
    known, as of some models of a stock engine.  Raises ModelError.
    """
    path = folder / "config.json"
    try:
        config = language_config(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as e:
        raise ModelError(f"{path}: cannot be read: {e}") from e

    longest, vocab_size = (
        value if isinstance(value := config.get(name), int) else 0
        for name in ("max_position_embeddings", "vocab_size")
    )
    lengths = [length for length in (longest, max_model_len) if length]
    if not lengths:
        raise ModelError(f"{path}: names no max_position_embeddings: set engine.maxModelLen")
    return min(lengths), vocab_size
