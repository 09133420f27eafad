"""Opens a runner: model, KV cache, ranks.  Warmed up and without unpacked weights on return."""

import gc
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Forward
from pdcluster_worker.model.decoder_loader import make_operations, open_decoder
from pdcluster_worker.model.generic import Generic, pack_linears
from pdcluster_worker.model.kv_cache import DeviceKVCache, KVCache, open_cache
from pdcluster_worker.model.kv_size import fit_length, stored_kv
from pdcluster_worker.model.loading.adapter import AdapterTarget, with_adapters
from pdcluster_worker.model.loading.loader import LoadedModel, ModelInfo, load_model
from pdcluster_worker.model.memory import release_library_pages
from pdcluster_worker.model.parallel.ranks import OnDeath, RankProcesses, rank_threads
from pdcluster_worker.model.parallel.ranks_loader import open_ranks
from pdcluster_worker.model.runner import Cache, Runner
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.system.native_dtype import dtype_of_device
from pdcluster_worker.system.process import trim_memory

logger = logging.getLogger(__name__)


def make_runner(
    loaded: LoadedModel, cache: KVCache | DeviceKVCache, engine: EngineConfig
) -> Runner:
    """On a GPU steps are planned ahead; on a CPU that would take a core from the kernels."""
    limits = StepLimits.of(engine, loaded.info.max_model_len)
    forward = assemble(loaded, cache.tensor, limits, invariant=engine.batch_invariant)
    logger.info("computes with operations=%s code=%s", forward.operations.name, forward.code)
    return Runner(loaded.info, forward, cache, limits, depth=2 if cache.tensor.is_cuda else 1)


def assemble(loaded: LoadedModel, cache: Tensor, limits: StepLimits, *, invariant: bool) -> Forward:
    """invariant: a row's bits do not depend on the batch.

    Raises ModelError where neither our decoder nor transformers' code can run so on the device.
    """
    stored = stored_kv(cache, loaded.info.geometry)
    if loaded.checkpoint is not None:
        return open_decoder(loaded.checkpoint, stored, limits, invariant=invariant)
    if invariant:
        raise ModelError(
            f"engine.batchInvariant needs our own decoder: {loaded.reason}; leave it out"
        )
    if cache.device.type != "cpu":
        raise ModelError(
            f"{loaded.reason}; other models run by transformers' code, on CPUs only: set "
            "engine.device: cpu"
        )
    operations = make_operations(stored, loaded.attention, limits, invariant=False)
    info = loaded.info
    pack_linears(loaded.module, operations, info.geometry.num_layers, info.max_model_len)
    return Generic(loaded.module, operations)


def open_runner(
    model: ModelConfig,
    engine: EngineConfig,
    device: str = "cpu",
    *,
    on_rank_death: OnDeath = logger.error,
    drafts_for: EngineConfig | None = None,
) -> tuple[Runner, Cache, ModelInfo]:
    """Load the model and reserve its KV cache on `device`, cpu or cuda.  Raises ModelError.

    on_rank_death: called from a thread with the reason, when another rank died.
    drafts_for:    the engine that this draft model is for; None = not a draft model.
    """
    if device == "cpu":
        engine = structs.replace(engine, device_memory_share=None)  # not used on CPUs
    if model.dtype == "auto":
        model = structs.replace(model, dtype=dtype_of_device(device))
    if engine.tensor_parallel_size * engine.pipeline_parallel_size == 1:
        return _open(model, engine, device, None, drafts_for)
    ranks = RankProcesses(model, engine, device, on_rank_death)
    try:
        return _open(model, engine, device, ranks)
    except BaseException:
        ranks.close()
        raise


def _open(
    model: ModelConfig,
    engine: EngineConfig,
    device: str,
    ranks: RankProcesses | None,
    drafts_for: EngineConfig | None = None,
) -> tuple[Runner, Cache, ModelInfo]:
    path = Path(model.path).expanduser()
    loaded = load_model(
        path,
        model.dtype,
        block_size=engine.block_size,
        max_model_len=engine.max_model_len,
        threads=engine.threads if ranks is None else rank_threads(engine),
        kv_dtype=engine.kv_cache_dtype,
        quantization=engine.quantization,
    )
    loaded = with_adapters(loaded, model.adapter_paths, model.runtime_adapters)
    try:
        runner, cache = (
            _make(loaded, engine, device, drafts_for)
            if ranks is None
            else _make_over(ranks, loaded, engine, device)
        )
    except (MemoryError, RuntimeError) as e:  # torch raises the latter, and names the bytes
        if not isinstance(e, MemoryError) and "memory" not in str(e):
            raise
        raise ModelError(
            f"no memory for packed weights of {loaded.weight_bytes} bytes beside the model: {e}"
        ) from e
    runner.grammars.folder = path
    if model.runtime_adapters is not None and loaded.checkpoint is not None:
        runner.allow_adapters(model.runtime_adapters, AdapterTarget.of(loaded.checkpoint))
    del loaded  # frees the weights that are packed now
    gc.collect()
    release_library_pages()
    start = time.monotonic()
    runner.warm_up()
    logger.info("warmed up seconds=%.1f", time.monotonic() - start)
    trim_memory()
    return runner, cache, runner.info


def _make(
    loaded: LoadedModel, engine: EngineConfig, device: str, drafts_for: EngineConfig | None
) -> tuple[Runner, Cache]:
    cache = open_cache(
        loaded.info.geometry,
        engine,
        torch.device(device),
        vocab_size=loaded.info.vocab_size,
        weight_bytes=loaded.weight_bytes,
        adapter_bytes=loaded.adapter_bytes,
        expert_bytes=loaded.expert_bytes(engine.max_batched_tokens),
        drafts_for=drafts_for,
    )
    info = fit_length(loaded.info, cache.num_blocks, engine, drafts_for)
    return make_runner(replace(loaded, info=info), cache, engine), cache


def _make_over(
    ranks: RankProcesses, loaded: LoadedModel, engine: EngineConfig, device: str
) -> tuple[Runner, Cache]:
    """A runner over several ranks, whose steps run in a thread."""
    limits = StepLimits.of(engine, loaded.info.max_model_len)
    shared, forward = open_ranks(loaded, engine, limits, ranks, device)
    info = fit_length(loaded.info, shared.num_blocks, engine)
    runner = Runner(info, forward, shared, limits, depth=2, in_thread=True)
    runner.kv_channels = ranks.kv_channels
    return runner, shared
