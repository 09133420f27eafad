"""Real engines in one process: the pure core over the real model runner, KV blocks moved by the local transport.

Only the processes and the network between them are left out; tests/system has those.
"""

import itertools
import time
from pathlib import Path

from pdcluster_worker.config import EngineConfig
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
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loader import DType, load_model
from pdcluster_worker.model.runner import make_runner
from pdcluster_worker.transfer.local import LocalFabric, LocalTransport

BLOCK_SIZE = 16
CONTINUOUS = SchedulerSettings()
MAX_STEPS = 20_000


class Engine:
    """One engine with its own model and cache; `settings` beyond the defaults by name."""

    def __init__(
        self,
        folder: Path,
        fabric: LocalFabric,
        name: str,
        *,
        dtype: DType = "float32",
        num_blocks: int = 1024,
        max_batched_tokens: int = 64,
        scheduler: SchedulerSettings = CONTINUOUS,
    ) -> None:
        loaded = load_model(folder, dtype, block_size=BLOCK_SIZE, threads=1)
        cache = KVCache(loaded.info.geometry, num_blocks)
        self.name = name
        self.stats: EngineStats | None = None
        self.core = EngineCore(
            EngineSettings(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_batched_tokens=max_batched_tokens,
                max_sequences=32,
                max_model_len=loaded.info.max_model_len,
                scheduler=scheduler,
            ),
            make_runner(loaded, cache, EngineConfig(max_batched_tokens=max(32, max_batched_tokens), max_sequences=32)),
            LocalTransport(fabric, cache, name, verify=True),
            time.monotonic,
        )

    def step(self) -> list[EngineOutput]:
        outputs = self.core.step()
        for output in outputs:
            if isinstance(output, EngineStats):
                self.stats = output
        return outputs


class Cluster:
    """A decode engine, and a prefill engine for requests that go the remote way."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DType = "float32",
        scheduler: SchedulerSettings = CONTINUOUS,
        **decode_settings: int,
    ) -> None:
        fabric = LocalFabric()
        self.decode = Engine(folder, fabric, "decode", dtype=dtype, scheduler=scheduler, **decode_settings)
        budget = decode_settings.get("max_batched_tokens", 64)
        self.prefill = Engine(folder, fabric, "prefill", dtype=dtype, scheduler=scheduler, max_batched_tokens=budget)
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
                target = Target(epoch, "decode", "decode", cached_tokens, block_ids)
                self.prefill.core.handle(Prefill(self._specs[request_id], target))
            case PrefillDone(request_id=request_id, checksum=checksum):
                assert checksum is not None
                self.decode.core.handle(ReceiveDone(request_id, self._epochs[request_id], self._first[request_id], checksum))
            case _:
                assert type(output).__name__ in ("EngineStats", "BlockEvents"), output
