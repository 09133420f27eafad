"""The two walls of dispatch, played by tests: an engine that answers from a script, and prefill
workers that record what they are asked.

Not replaced: EngineClient, CreditBroker, RemotePrefill, DecodeDispatcher and the pure routing under
              them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from prometheus_client import Counter

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import (
    DiscoveryConfig,
    ListenConfig,
    ModelConfig,
    Role,
    TLSConfig,
    WorkerConfig,
)
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import (
    EngineInput,
    EngineOutput,
    EngineReady,
    EngineStats,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.facts import DeviceFacts, KVGeometry
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.worker_context import WorkerContext

EPOCH = b"e" * 16
FACTS = EngineReady(
    *("engine-1", [9100], KVGeometry(1, 8, 1, 4, "float32"), "w", "float32"),
    num_blocks=64,
    max_model_len=256,
    vocab_size=100,
    device=DeviceFacts("cpu", "Xeon", "", "reference", "decoder"),
    transport="tcp",
)


def stats(free_blocks: int, num_transfers: int = 0, num_inputs: int = 0) -> EngineStats:
    """Statistics of an engine with that many free blocks and nothing else to say."""
    return EngineStats(
        blocks={"free": free_blocks},
        free_blocks=free_blocks,
        num_transfers=num_transfers,
        num_inputs=num_inputs,
    )


def steps_of(*steps: tuple[str, float], num_steps: int = 0, bytes_sent: int = 0) -> EngineStats:
    return replace(
        stats(free_blocks=0), steps=list(steps), num_steps=num_steps, bytes_sent=bytes_sent
    )


def config_of(tls: TLSConfig, role: Role, **engine: int) -> WorkerConfig:
    """Settings of a worker of which nothing can be reached."""
    return WorkerConfig(
        cluster="c",
        revision="r1",
        role=role,
        pool="p",
        model=ModelConfig(name="m", path="/m"),
        discovery=DiscoveryConfig(endpoints=["127.0.0.1:1"]),
        tls=tls,
        engine=EngineConfig(**engine),
        listen=ListenConfig(host="127.0.0.1"),
    )


def client_of(worker: WorkerContext) -> EngineClient:
    return worker.engines.first.client


class ScriptedEngine:
    """The engine process: collects inputs; `answer` maps an input to its outputs."""

    def __init__(self) -> None:
        self.inputs: list[EngineInput] = []
        self.answer: Callable[[EngineInput], Sequence[EngineOutput]] = lambda _: ()
        self._arriving: asyncio.Queue[bytes] = asyncio.Queue()

    async def recv(self) -> bytes:
        return await self._arriving.get()

    async def send(self, data: bytes) -> None:
        for message in messages.decode_inputs(data):
            self.inputs.append(message)
            self.say(*self.answer(message))

    def say(self, *outputs: EngineOutput) -> None:
        if outputs:
            self._arriving.put_nowait(messages.encode(list(outputs)))


class RecordingPeer:
    """A prefill worker: records wants and releases, and plays `replies` to a prefill.

    grants: every want, at once.
    """

    def __init__(
        self, key: str, matched_blocks: int = 0, waiting_tokens: int = 0, *, grants: bool = False
    ) -> None:
        self.key = key
        self.grants = grants
        self.record = SimpleNamespace(http_address=f"{key}:8000", device=FACTS.device)
        self.load = WorkerLoad(waiting_tokens=waiting_tokens)
        self.matched_blocks = matched_blocks
        self.claims: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.targets: list[TransferTarget] = []
        self.replies: list[Token | PrefillDone | Exception] = []
        self.closed = False
        self.ready = True
        self.state = "ready"
        self.max_model_len = 0
        self.max_batched_tokens = 0
        self.broker: CreditBroker | None = None  # that its answers to claims go to

    def prefix_match(self, hashes: Sequence[bytes]) -> int:
        return self.matched_blocks

    def claim(self, request_id: str, tokens: int, priority: int) -> None:
        self.claims.append((request_id, tokens))
        if self.grants and self.broker is not None:
            asyncio.get_running_loop().call_soon(self.broker.on_credit, self, request_id, True)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        self.targets.append(target)
        try:
            for reply in self.replies:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            self.closed = True


async def until(condition: Callable[[], object]) -> None:
    """Let others run until it holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def totals(counter: Counter, *labels: str) -> dict[Any, float]:
    """Counts by the values of these labels: by that of one alone, or by a tuple."""
    samples = [s for s in counter.collect()[0].samples if s.name.endswith("_total") and s.value]
    keys = [tuple(s.labels[name] for name in labels) for s in samples]
    return {key if len(key) > 1 else key[0]: s.value for key, s in zip(keys, samples, strict=True)}


def outcomes(worker: WorkerContext) -> dict[str, float]:
    """Remote prefills by how they ended."""
    return totals(worker.metrics.remote_prefill, "outcome")


def compute(message: EngineInput) -> Sequence[EngineOutput]:
    """An engine with room: token 7 of a prompt, then 8, which ends the request."""
    match message:
        case Receive(spec=spec):
            return [ReceiveReady(spec.request_id, EPOCH, 4, [5, 6])]
        case Submit(RequestSpec(request_id=name)) | ReceiveFailed(request_id=name, first=None):
            return [Tokens([Token(name, 7)]), Tokens([Token(name, 8, finish_reason="length")])]
        case ReceiveDone(request_id=name) | ReceiveFailed(request_id=name):
            return [Tokens([Token(name, 8, finish_reason="length")])]
    return []


async def collect(
    dispatcher: DecodeDispatcher, spec: RequestSpec, prefill: PrefillMode
) -> list[Generated]:
    async with asyncio.timeout(20):
        return [generated async for generated in dispatcher.run(spec, prefill)]


def dispatcher_of(
    worker: WorkerContext,
    peers: Sequence[Any] = (),
    *,
    decodes: Callable[[], list[Any]] = list,
    holder: Callable[[str], Any] = lambda _: None,
) -> DecodeDispatcher:
    """Over prefill workers, which may come and go.  holder: of KV, by key."""
    broker = CreditBroker(
        worker.credit_queue, lambda: list(peers), PrefillScoreSpec, worker.block_size
    )
    for peer in peers:
        peer.broker = broker
    remote = RemotePrefill(worker, broker)
    return DecodeDispatcher(worker, remote, lambda: list(peers), decodes, holder)
