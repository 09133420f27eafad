"""Real engines in one process: the pure core over the real model runner, KV blocks moved by the local transport.

Only the processes and the network between them are left out; tests/system has those.
"""

import itertools
import time
from pathlib import Path

from pdcluster_worker.config import EngineConfig, ModelConfig
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.messages import (
    EngineOutput,
    EngineStats,
    Prefill,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveReady,
    RequestSpec,
    Submit,
    Target,
    Token,
    Tokens,
)
from pdcluster_worker.engine.settings import EngineSettings, SchedulerSettings
from pdcluster_worker.model.loader import DType
from pdcluster_worker.model.runner import open_runner
from pdcluster_worker.transfer.local import LocalFabric, LocalTransport

BLOCK_SIZE = 16
CONTINUOUS = SchedulerSettings()
MAX_STEPS = 20_000


class Engine:
    """One engine with its own model and cache; with several ranks, the others are processes of their own."""

    def __init__(
        self,
        folder: Path,
        fabric: LocalFabric,
        name: str,
        *,
        dtype: DType = "float32",
        num_blocks: int = 1024,
        max_batched_tokens: int = 64,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        scheduler: SchedulerSettings = CONTINUOUS,
    ) -> None:
        settings = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            threads=1,
            max_batched_tokens=max(32, max_batched_tokens),
            max_sequences=32,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        self.runner, cache, info = open_runner(ModelConfig("tiny", str(folder), dtype), settings)
        self.name = name
        self.stats: EngineStats | None = None
        self.core = EngineCore(
            EngineSettings(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_batched_tokens=max_batched_tokens,
                max_sequences=32,
                max_model_len=info.max_model_len,
                scheduler=scheduler,
            ),
            self.runner,
            LocalTransport(fabric, cache, name, verify=True),
            time.monotonic,
        )

    def step(self) -> list[EngineOutput]:
        outputs = self.core.step()
        for output in outputs:
            if isinstance(output, EngineStats):
                self.stats = output
        return outputs


class Pair:
    """A decode engine, and a prefill engine for requests that go the remote way; both on one fabric."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._ids = itertools.count()
        self._specs: dict[str, RequestSpec] = {}
        self._epochs: dict[str, bytes] = {}
        self._first: dict[str, Token] = {}

    def run(self, specs: list[RequestSpec], *, remote: bool) -> list[list[Token]]:
        """All requests together; the tokens of each, in order.  Each id may be used once."""
        tokens: dict[str, list[Token]] = {spec.request_id: [] for spec in specs}
        self._specs = {spec.request_id: spec for spec in specs}
        for spec in specs:
            self.decode.core.handle(Receive(spec) if remote else Submit(spec))
        for _ in range(MAX_STEPS):
            for output in [*self.decode.step(), *self.prefill.step()]:
                self._take(output, tokens)
            if all(answer and answer[-1].finish_reason for answer in tokens.values()):
                return list(tokens.values())
        raise AssertionError(f"not finished after {MAX_STEPS} steps")

    def _take(self, output: EngineOutput, tokens: dict[str, list[Token]]) -> None:
        match output:
            case Tokens(tokens=made):
                for token in made:
                    tokens[token.request_id].append(token)
                    self._first.setdefault(token.request_id, token)
            case ReceiveReady(request_id=request_id, epoch=epoch, cached_tokens=cached_tokens, block_ids=block_ids):
                self._epochs[request_id] = epoch
                target = Target(epoch, self.decode.name, self.decode.name, cached_tokens, block_ids)
                self.prefill.core.handle(Prefill(self._specs[request_id], target))
            case PrefillDone(request_id=request_id, checksum=checksum):
                assert checksum is not None
                self.decode.core.handle(ReceiveDone(request_id, self._epochs[request_id], self._first[request_id], checksum))
            case _:
                assert type(output).__name__ in ("EngineStats", "BlockEvents"), output


class Cluster(Pair):
    """Two engines of its own, of one rank each."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DType = "float32",
        scheduler: SchedulerSettings = CONTINUOUS,
        **decode_settings: int,
    ) -> None:
        fabric = LocalFabric()
        decode = Engine(folder, fabric, "decode", dtype=dtype, scheduler=scheduler, **decode_settings)
        budget = decode_settings.get("max_batched_tokens", 64)
        super().__init__(Engine(folder, fabric, "prefill", dtype=dtype, scheduler=scheduler, max_batched_tokens=budget), decode)
