"""Settings of each data-parallel engine: shares of threads, memory and bandwidth of its worker."""

from dataclasses import dataclass

import msgspec

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.system.cgroups import available_threads


@dataclass(frozen=True, slots=True)
class EngineRank:
    """board: descriptor of the engines' shared memory; None = none."""

    rank: int = 0
    board: int | None = None


def share_of(config: WorkerConfig, rank: int) -> WorkerConfig:
    if config.engine.data_parallel_size == 1:
        return config
    kv = config.listen.kv
    listen = msgspec.structs.replace(
        config.listen, kv=kv + rank * config.engine.num_kv_ports if kv else 0
    )
    return msgspec.structs.replace(config, engine=_share(config.engine), listen=listen)


def has_board(engine: EngineConfig) -> bool:
    """Return whether the engines of a worker share state."""
    delayer = engine.prefill_delayer
    return engine.data_parallel_size > 1 and delayer is not None and delayer.enabled


def thread_share(engine: EngineConfig) -> int:
    """CPU threads of each engine; 0 = from the machine."""
    size = engine.data_parallel_size
    return engine.threads if size == 1 else max(1, (engine.threads or available_threads()) // size)


def _share(engine: EngineConfig) -> EngineConfig:
    size = engine.data_parallel_size
    memory_share, num_blocks = engine.device_memory_share, engine.num_blocks
    return msgspec.structs.replace(
        engine,
        threads=thread_share(engine),
        kv_cache_memory=max(1, engine.kv_cache_memory // size),
        num_blocks=None if num_blocks is None else num_blocks // size,
        device_memory_share=None if memory_share is None else memory_share / size,
        # 0 would be no limit at all.
        transfer_bandwidth=max(1, engine.transfer_bandwidth // size)
        if engine.transfer_bandwidth
        else 0,
    )
