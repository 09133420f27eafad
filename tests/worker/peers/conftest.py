"""Real parts for the tests of peers: etcd processes, certificates of a real CA, gRPC over real
mutual TLS on loopback.

Inputs are WorkerRecords and the handler below, which stands where dispatch will; nothing else is
replaced.
"""

import asyncio
import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from pdcluster_schema.etcd_keys import command_key, role_key, worker_key, workers_prefix
from pdcluster_worker.config.worker import DiscoveryConfig, TLSConfig
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Generated, Hello, Report, TraceEvent, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.client import LocalWorker, Peer, PeerEvents
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.discovery import Discovery, DiscoveryEvents, DiscoveryKeys
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.service import WorkerService, start_grpc
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.prefix_index import PrefixIndex
from pdcluster_worker.tracing import trace_context
from tests.authorities import new_authority, worker_pair, write_pair
from tests.system.etcd_server import EtcdServer

GEOMETRY = KVGeometry(num_kv_heads=2, head_dim=4, num_layers=2, block_size=16, dtype="float32")
DEADLINE_SECONDS = 20.0


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Poll a condition until it holds; fails at a deadline that only a broken program reaches."""

    async def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := condition()):
            assert time.monotonic() < deadline, "the condition never held"
            await asyncio.sleep(0.01)
        return value

    return wait


class MortalEtcd(EtcdServer):
    """One that is a new cluster at each start, and ends by either signal."""

    def start(self, *, empty: bool = False) -> None:
        token = ("--initial-cluster-token", uuid.uuid4().hex)
        self._flags = (*token, "--heartbeat-interval", "20", "--election-timeout", "200")
        super().start(empty=empty)

    def terminate(self) -> None:
        """SIGTERM, as a planned restart."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        self._process = None

    def ctl(self, *arguments: str) -> str:
        program = str(Path(sys.executable).with_name("etcdctl"))
        command = [program, "--endpoints", self.endpoint, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalEtcd]:
    """One etcd for the tests that leave it running; each takes a namespace of its own."""
    server = MortalEtcd(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def stopped_etcd(tmp_path: Path) -> Iterator[MortalEtcd]:
    """An etcd of the test's own, not started."""
    server = MortalEtcd(tmp_path)
    yield server
    server.close()


@pytest.fixture
def own_etcd(stopped_etcd: MortalEtcd) -> MortalEtcd:
    """An etcd of the test's own, started."""
    stopped_etcd.start()
    return stopped_etcd


@pytest.fixture
def record() -> Callable[..., WorkerRecord]:
    """A WorkerRecord with defaults."""

    def make(pod: str, **changes: Any) -> WorkerRecord:
        values: dict[str, Any] = {
            "engine_id": f"engine-of-{pod}",
            "pod": pod,
            "grpc_address": "127.0.0.1:1",
            "kv_address": "127.0.0.1:2",
            "http_address": "127.0.0.1:3",
            "role": "decode",
            "pool": "main",
            "state": "ready",
        }
        return WorkerRecord(**(values | changes))

    return make


class Watcher:
    """A Discovery with its calls; `dead` holds the pods whose probes fail.  obeys: its record
    follows the drain command.
    """

    def __init__(
        self,
        endpoints: list[str],
        own: WorkerRecord,
        namespace: str,
        lease_seconds: int,
        *,
        obeys: bool,
        pinned: dict[str, bytes],
    ) -> None:
        self.own = own
        self._obeys = obeys
        prefix = workers_prefix(namespace, "chat", "r1")
        self.command = command_key(namespace, "chat", own.pod)
        self.own_key = worker_key(prefix, own.role, own.pool, own.pod)
        self.members: dict[str, WorkerRecord] = {}
        self.told: list[dict[str, WorkerRecord]] = []
        self.drains: list[bool] = []
        self.graces: list[float] = []
        self.role = role_key(namespace, "chat", own.pod)
        self.roles: list[str | None] = []
        self.dead: set[str] = set()
        self.probed: list[str] = []
        self.discovery = Discovery(
            DiscoveryConfig(endpoints=endpoints, lease_seconds=lease_seconds),
            DiscoveryKeys(prefix, self.command, self.role, pinned),
            DiscoveryEvents(self._on_members, self._on_drain, self.roles.append, self._probe),
        )
        self.discovery.start(own)

    @property
    def pods(self) -> set[str]:
        return set(self.members)

    def _on_members(self, members: dict[str, WorkerRecord]) -> None:
        self.members = members
        self.told.append(members)

    def _on_drain(self, present: bool, grace_seconds: float) -> None:
        self.drains.append(present)
        self.graces.append(grace_seconds)
        if self._obeys:
            self.discovery.update(
                msgspec.structs.replace(self.own, state="draining" if present else "ready")
            )

    async def _probe(self, member: WorkerRecord) -> bool:
        self.probed.append(member.pod)
        return member.pod not in self.dead


@pytest.fixture
async def watcher(record: Callable[..., WorkerRecord]) -> AsyncIterator[Callable[..., Watcher]]:
    """Start a Discovery for a pod; ended with the test."""
    namespace = uuid.uuid4().hex
    started: list[Watcher] = []

    def start(
        endpoint: str | list[str],
        pod: str,
        *,
        lease_seconds: int = 2,
        obeys: bool = False,
        pinned: dict[str, bytes] | None = None,
        **changes: Any,
    ) -> Watcher:
        endpoints = [endpoint] if isinstance(endpoint, str) else endpoint
        started.append(
            Watcher(
                endpoints,
                record(pod, **changes),
                namespace,
                lease_seconds,
                obeys=obeys,
                pinned=pinned or {},
            )
        )
        return started[-1]

    yield start
    await asyncio.gather(*(one.discovery.close() for one in started))


class Authority:
    """A CA that signs worker certificates."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._serial, self._pair = folder, itertools.count(), new_authority()

    def issue(self, trusted: "Authority | None" = None) -> TLSConfig:
        """Files of one worker; `trusted` is the CA that it believes in, if not this one."""
        folder = self._folder / f"worker-{next(self._serial)}"
        folder.mkdir()
        ca, _ = write_pair(folder, "ca", (trusted or self)._pair)
        certificate, key = write_pair(folder, "worker", worker_pair(self._pair))
        return TLSConfig(ca=str(ca), certificate=str(certificate), key=str(key))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The cluster's CA."""
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def stranger_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another cluster's CA."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def credentials(authority: Authority) -> Credentials:
    """Credentials of a worker of the cluster."""
    return Credentials(authority.issue())


class Handler:
    """Stands where dispatch will: echoes prompts, and lets a test hold, fail and
    watch each call.
    """

    def __init__(self, hello: Hello, limit_tokens: int) -> None:
        self.engine_id = hello.engine_id
        self.ledger = CreditLedger(limit_tokens)
        self.reports: list[Report] = [Report(WorkerLoad(num_running=1), snapshot=True)]
        self.report_added = asyncio.Event()
        self.error: Exception | None = None
        self.degraded: tuple[str, ...] = ()
        self.needs_credit = True
        self.hold = False  # stop after the first token until closed
        self.calls: list[tuple[Any, ...]] = []
        self.closed: list[str] = []
        self.contexts: list[dict[str, str]] = []
        self.notes: tuple[TraceEvent, ...] = ()
        self.watches = 0
        self._hello = hello

    def hello(self) -> Hello:
        return self._hello

    async def ask(self, path: str, body: bytes) -> bytes:
        self.calls.append(("ask", path, body))
        if self.error is not None:
            raise self.error
        return b"tokens of " + body

    async def generate(self, spec: RequestSpec, prefill: str) -> AsyncIterator[Generated]:
        self.calls.append(("generate", spec, prefill))
        self.contexts.append(trace_context.current())
        try:
            yield Generated(
                Token(spec.request_id, spec.prompt[0]),
                "remote",
                degraded=self.degraded,
                notes=self.notes,
            )
            await self._maybe_stop()
            yield Generated(Token(spec.request_id, spec.prompt[-1], finish_reason="length"))
        finally:
            self.closed.append(spec.request_id)

    async def prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncIterator[Token | PrefillDone]:
        self.calls.append(("prefill", peer, spec, target))
        self.contexts.append(trace_context.current())
        try:
            ends = spec.sampling.max_tokens == 1
            yield Token(spec.request_id, spec.prompt[-1], finish_reason="length" if ends else None)
            await self._maybe_stop()
            if not ends:
                yield PrefillDone(spec.request_id, 4096, 0.5, checksum=7)
        finally:
            self.closed.append(spec.request_id)

    async def watch(self) -> AsyncIterator[Report]:
        self.watches += 1
        for position in itertools.count():
            while position >= len(self.reports):
                self.report_added.clear()
                await self.report_added.wait()
            yield self.reports[position]

    async def _maybe_stop(self) -> None:
        if self.error is not None:
            raise self.error
        if self.hold:
            await asyncio.Event().wait()


class Worker:
    """One worker: service, directory and the calls of the directory; left: the prefill workers at
    each loss; changes: (ready, has_drained) at each change of a peer.
    """

    def __init__(
        self, record: WorkerRecord, hello: Hello, limit_tokens: int, credentials: Credentials
    ) -> None:
        self.record = record
        self.hello = hello
        self.metrics = Metrics()
        self.refusals = Refusals(self.metrics)
        self.index = PrefixIndex()
        self.handler = Handler(hello, limit_tokens)
        self.service = WorkerService(self.handler, self.refusals)  # type: ignore[arg-type]
        self.credits: list[tuple[str, str, bool]] = []
        self.lost: list[str] = []
        self.changes: list[tuple[bool, bool]] = []
        self.left: list[list[Peer]] = []
        events = PeerEvents(
            lambda peer, request_id, granted: self.credits.append((peer.key, request_id, granted)),
            self._on_lost,
            lambda peer: self.changes.append((peer.ready, peer.has_drained)),
        )
        self.directory = Directory(
            record.pod,
            LocalWorker(hello, credentials, self.refusals, self.index),
            self.metrics,
            record.pod_role,
        )
        self.directory.report_to(events)
        self.server: grpc.aio.Server | None = None

    def _on_lost(self, peer: Peer) -> None:
        self.lost.append(peer.key)
        self.left.append(self.directory.prefills())

    def sees(self, *others: "Worker") -> None:
        """Give it the membership: itself and the others."""
        self.directory.set_members({worker.record.pod: worker.record for worker in (self, *others)})


@pytest.fixture
async def worker(
    record: Callable[..., WorkerRecord], credentials: Credentials
) -> AsyncIterator[Callable[..., Any]]:
    """Start a worker: (pod, role, ...) -> Worker with a gRPC server; ended with the test."""
    async with AsyncExitStack() as stack:

        async def start(
            pod: str,
            role: str,
            *,
            limit_tokens: int = 100,
            port: int = 0,
            creds: Credentials | None = None,
            pod_role: str | None = None,
            **changes: Any,
        ) -> Worker:
            creds = creds or credentials
            facts: dict[str, Any] = {
                "engine_id": f"engine-of-{pod}",
                "geometry": GEOMETRY,
                "weights": "w1",
            } | changes
            hello = Hello(role=role, revision="r1", **facts)
            said = {"role": role, "engine_id": facts["engine_id"], "pod_role": pod_role}
            one = Worker(record(pod, **said), hello, limit_tokens, creds)
            one.server, bound = await start_grpc(one.service, "127.0.0.1", port, creds)
            one.record = record(pod, grpc_address=f"127.0.0.1:{bound}", **said)
            stack.push_async_callback(one.server.stop, None)
            stack.push_async_callback(one.directory.close)
            return one

        yield start


@pytest.fixture
def spec() -> Callable[..., RequestSpec]:
    """A RequestSpec with defaults."""

    def make(
        request_id: str = "q1", *, max_tokens: int = 8, prompt: list[int] | None = None
    ) -> RequestSpec:
        return RequestSpec(
            request_id, prompt or [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=3)
        )

    return make


@pytest.fixture
def target() -> TransferTarget:
    """Blocks of the decode worker `d`."""
    return TransferTarget(bytes(range(16)), "engine-of-d", ["127.0.0.1:9"], 0, [4, 9])
