"""Real engines in one process: the pure core over the real model runner, KV blocks moved by the
local transport, or by one of those of workers.

Only the processes and the network between them are left out; tests/system has those.
"""

import threading
import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from pdcluster_worker.config.engine import EngineConfig, KvCacheDtype
from pdcluster_worker.config.worker import ModelConfig, RuntimeAdaptersConfig
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.ports import Drafter, Transport
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.tier_ports import NO_TIERS, KVTierIO
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.sharded import ShardedTransport
from pdcluster_worker.kv_transfer.tcp import TcpPort, TcpSettings
from pdcluster_worker.messages.engine import (
    EngineOutput,
    EngineStats,
    Prefill,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveReady,
    ReceiveRefused,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.engine_settings import (
    EngineSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.system.native_dtype import DType
from tests.worker.local_transport import LocalFabric, LocalTransport

BLOCK_SIZE = 16
CONTINUOUS = SchedulerSettings()
MAX_SEQUENCES = 32
MAX_STEPS = 20_000
MAX_WAIT_SECONDS = 0.1


class Model:
    """A loaded model with its cache, for engines one after another; with several ranks, the others
    are processes of their own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DType = "float32",
        kv_dtype: KvCacheDtype = "auto",
        num_blocks: int = 1024,
        max_batched_tokens: int = 64,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        adapters: dict[str, str] | None = None,
        runtime_adapters: RuntimeAdaptersConfig | None = None,
    ) -> None:
        settings = EngineConfig(
            block_size=BLOCK_SIZE,
            kv_cache_dtype=kv_dtype,
            num_blocks=num_blocks,
            threads=1,
            max_batched_tokens=max(MAX_SEQUENCES, max_batched_tokens),
            max_sequences=MAX_SEQUENCES,
            speculation=SpeculationSettings(),
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        self.runner, self.cache, self.info = open_runner(
            ModelConfig(
                *("tiny", str(folder), dtype),
                adapter_paths=adapters or {},
                runtime_adapters=runtime_adapters,
            ),
            settings,
        )
        self._limits = StepLimits.of(settings, self.info.max_model_len)

    def ahead(self) -> "Model":
        """The same, but its next step is submitted while one computes in a thread, as
        ranks do it.
        """
        model = copy(self)
        model.runner = Runner(
            self.info, self.runner.forward, self.cache, self._limits, depth=2, in_thread=True
        )
        model.runner.grammars.folder = self.runner.grammars.folder
        return model


class Guesses:
    """A drafter that knows the answers, and is wrong at every fifth position."""

    def __init__(self, expected: list[list[Token]]) -> None:
        self._expected = expected

    def may_follow(self, request: EngineRequest) -> bool:
        return request.num_tokens % 3 > 0

    def draft(self, wanted: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        return [self._draft(request, num_tokens) for request, num_tokens in wanted]

    def _draft(self, request: EngineRequest, num_tokens: int) -> list[int]:
        answer, start = (
            self._expected[int(request.request_id.split("-")[-1])],
            request.num_output_tokens,
        )
        return [
            token.token_id ^ (at % 5 == 0)
            for at, token in enumerate(answer[start : start + num_tokens], request.num_tokens)
        ]

    def forget(self, request_id: str) -> None:
        pass


def rank_memories(cache: KVCache) -> list[KVCache]:
    """Memories of each rank that moves its heads, over the bytes that all share."""
    memories: list[KVCache] = []
    num_heads, size = cache.geometry.num_kv_heads, len(cache.heads)
    for first in range(0, num_heads, size):
        memory = copy(cache)
        memory.heads = range(first, first + size)
        memories.append(memory)
    return memories


class Wiring(Protocol):
    """Connects engines to one another."""

    def connect(self, memories: list[KVCache], name: str) -> tuple[Transport, list[str]]:
        """The transport of an engine, and the addresses of its ports."""
        ...

    def wait(self) -> None:
        """Until something may have happened to a transport."""
        ...


class LocalWiring:
    """Copies of blocks within the process."""

    def __init__(self) -> None:
        self._fabric = LocalFabric()

    def connect(self, memories: list[KVCache], name: str) -> tuple[Transport, list[str]]:
        return LocalTransport(self._fabric, memories, name, verify=True), [name] * len(memories)

    def wait(self) -> None:
        """All has happened."""


class SocketWiring:
    """The transport of workers, by sockets of this machine; a port for each rank."""

    def __init__(self, transport: TransportName) -> None:
        self._settings = TcpSettings(verify=True, transport=transport)
        self._awake = threading.Event()
        self._ports: list[TcpPort] = []

    def connect(self, memories: list[KVCache], name: str) -> tuple[Transport, list[str]]:
        ports = [
            TcpPort(memory, name, ("127.0.0.1", 0), self._awake.set, self._settings)
            for memory in memories
        ]
        self._ports += ports
        addresses = [f"127.0.0.1:{port.port}" for port in ports]
        return ShardedTransport(ports, self._awake.set), addresses

    def wait(self) -> None:
        self._awake.wait(MAX_WAIT_SECONDS)
        self._awake.clear()

    def close(self) -> None:
        for port in self._ports:
            port.close()


class Engine:
    """An engine over a model, whose cache it has to itself."""

    def __init__(
        self,
        model: Model,
        wiring: Wiring,
        name: str,
        *,
        num_blocks: int = 1024,
        max_batched_tokens: int = 64,
        max_model_len: int | None = None,
        max_sequences: int = MAX_SEQUENCES,
        scheduler: SchedulerSettings = CONTINUOUS,
        drafter: Drafter | None = None,
        tiers: KVTierIO = NO_TIERS,
    ) -> None:
        self.runner = model.runner
        self.name = name
        assert isinstance(model.cache, KVCache), "these engines compute on the CPU"
        memories = rank_memories(model.cache)
        transport, self.addresses = wiring.connect(memories, name)
        self.wait = wiring.wait
        self.stats: EngineStats | None = None
        self.core = EngineCore(
            EngineSettings(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_batched_tokens=max_batched_tokens,
                max_sequences=max_sequences,
                max_model_len=max_model_len or model.info.max_model_len,
                scheduler=scheduler,
                speculation=None if drafter is None else SpeculationSettings(adaptive=False),
                adapters=frozenset(model.info.adapters),
            ),
            self.runner,
            transport,
            time.monotonic,
            drafter=drafter,
            tiers=tiers,
        )

    def step(self) -> list[EngineOutput]:
        outputs = self.core.step()
        for output in outputs:
            if isinstance(output, EngineStats):
                self.stats = output
        return outputs


class Pair:
    """Decode engines, of which each request has one, and a prefill engine for those that go the
    remote way; all on one fabric.
    """

    def __init__(self, prefill: Engine, *decodes: Engine) -> None:
        self.prefill, self.decodes = prefill, decodes
        self.done: list[PrefillDone] = []
        self._specs: dict[str, RequestSpec] = {}
        self._homes: dict[str, Engine] = {}
        self._epochs: dict[str, bytes] = {}
        self._first: dict[str, Token] = {}

    @property
    def decode(self) -> Engine:
        """The first of them."""
        return self.decodes[0]

    @property
    def engines(self) -> list[Engine]:
        """Each once."""
        return list(dict.fromkeys((*self.decodes, self.prefill)))

    def run(self, specs: list[RequestSpec], *, remote: bool) -> list[list[Token]]:
        """All requests together; the tokens of each, in order.  Each id may be used once."""
        tokens: dict[str, list[Token]] = {spec.request_id: [] for spec in specs}
        self._specs = {spec.request_id: spec for spec in specs}
        for index, spec in enumerate(specs):
            home = self._homes[spec.request_id] = self.decodes[index % len(self.decodes)]
            home.core.handle(Receive(spec) if remote else Submit(spec))
        for _ in range(MAX_STEPS):
            for engine in self.engines:
                for output in engine.step():
                    self._take(output, tokens)
            if not any(engine.core.has_work for engine in self.engines):
                self.decode.wait()
            if all(answer and answer[-1].finish_reason for answer in tokens.values()):
                self._settle()
                return list(tokens.values())
        raise AssertionError(f"not finished after {MAX_STEPS} steps")

    def _settle(self) -> None:
        """End the steps that are under way though no request needs them, and take the last
        statistics.
        """
        for engine in self.engines:
            while engine.core.has_work:
                engine.step()

    def _take(self, output: EngineOutput, tokens: dict[str, list[Token]]) -> None:
        match output:
            case Tokens(tokens=made):
                for token in made:
                    tokens[token.request_id].append(token)
                    self._first.setdefault(token.request_id, token)
            case ReceiveReady(
                request_id=request_id, epoch=epoch, cached_tokens=cached_tokens, block_ids=block_ids
            ):
                self._epochs[request_id] = epoch
                home = self._homes[request_id]
                target = TransferTarget(epoch, home.name, home.addresses, cached_tokens, block_ids)
                self.prefill.core.handle(Prefill(self._specs[request_id], target))
            case ReceiveRefused(request_id=request_id):
                self._homes[request_id].core.handle(Receive(self._specs[request_id]))
            case PrefillDone(request_id=request_id, checksum=checksum):
                assert checksum is not None
                self.done.append(output)
                done = ReceiveDone(
                    request_id, self._epochs[request_id], self._first[request_id], checksum
                )
                self._homes[request_id].core.handle(done)
            case _:
                assert type(output).__name__ in ("EngineStats", "BlockEvents", "Preempted"), output


class Cluster(Pair):
    """Two engines with models of their own, of one rank each."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DType = "float32",
        scheduler: SchedulerSettings = CONTINUOUS,
        **decode: Any,
    ) -> None:
        budget = decode.get("max_batched_tokens", 64)
        models = [Model(folder, dtype=dtype, max_batched_tokens=budget) for _ in range(2)]
        super().__init__(*engines_over(models, scheduler=scheduler, **decode))


def engines_over(
    models: list[Model],
    scheduler: SchedulerSettings = CONTINUOUS,
    drafter: Drafter | None = None,
    wiring: Wiring | None = None,
    **decode: Any,
) -> list[Engine]:
    """A prefill engine over the first model and decode engines of these sizes over the others."""
    wiring = wiring or LocalWiring()
    budget = {
        name: decode[name] for name in ("max_batched_tokens", "max_model_len") if name in decode
    }
    prefill = Engine(models[0], wiring, "prefill", scheduler=scheduler, **budget)
    return [
        prefill,
        *(
            Engine(model, wiring, f"decode-{index}", scheduler=scheduler, drafter=drafter, **decode)
            for index, model in enumerate(models[1:])
        ),
    ]
