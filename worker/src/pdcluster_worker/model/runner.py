"""Runs a batch: plan, one forward pass over all its tokens, one sample for each request that is up to date.

`Runner` is the engine's `ModelRunner`.  It knows a request's tokens, block
table and sampling, and nothing of queues, transfers or clients.  Running the
same items again writes the same keys and values and chooses the same tokens.
"""

import gc
import logging
import time
from pathlib import Path

import torch

from pdcluster_worker.config import EngineConfig, ModelConfig
from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.ports import RowOutcome, Sample, StepSeconds
from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.answers import Asked, Question, forget
from pdcluster_worker.model.assembly import assemble
from pdcluster_worker.model.device_cache import DeviceKVCache, open_cache
from pdcluster_worker.model.families import NotOursError
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loader import LoadedModel, ModelInfo
from pdcluster_worker.model.opening import by_transformers, open_model
from pdcluster_worker.model.ops.freed_memory import give_back_freed_memory
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.sampler import Sampler
from pdcluster_worker.model.step_plan import StepPlanner, row_sizes
from pdcluster_worker.native_dtype import read_native_dtype

logger = logging.getLogger(__name__)


class Runner:
    """A loaded model over its KV cache.

    forward: what computes its layers.  longest_warm_up_seconds: of the steps of `warm_up`.
    seconds: see `engine.ports.ModelRunner`.
    """

    def __init__(self, info: ModelInfo, forward: Forward, cache: KVCache | DeviceKVCache, limits: StepLimits) -> None:
        self.info = info
        self.seconds = StepSeconds()
        self.longest_warm_up_seconds = 0.0
        self.forward = forward
        self._cache = cache
        self._max_tokens = limits.max_tokens
        self._planner = StepPlanner(
            block_size=limits.block_size,
            max_sequences=limits.max_sequences,
            max_tokens=limits.max_tokens,
            max_blocks=limits.blocks,
            pads=forward.operations.pads_rows,
        )
        self._sampler = Sampler(info.vocab_size, forward.operations.choosing)

    def execute(self, batch: Batch) -> list[RowOutcome]:
        """Compute the batch; see `engine.ports.ModelRunner`.

        A request whose logits are not finite, or whose sampling leaves no token, fails alone.
        Raises whatever the model raises.
        """
        if not batch.items:
            return []
        started = time.monotonic()
        plan = self._planner.plan(batch)
        with torch.inference_mode():
            planned = time.monotonic()
            logits = self.forward.logits(plan).cpu()  # tokens are chosen in host memory
            computed = time.monotonic()
            sampled = [item.request for item in batch.items if item.samples]
            samples = iter(self._sampler.sample(logits, sampled) if sampled else ())
        self.seconds = StepSeconds(planned - started, computed - planned, time.monotonic() - computed)
        return [next(samples) if item.samples else None for item in batch.items]

    def forget(self, request_id: str) -> None:
        """Drop what is kept for this request; unknown ids are a no-op."""
        self._planner.forget(request_id)
        self._sampler.forget(request_id)

    def warm_up(self) -> None:
        """Meet the sizes that the flat row is padded to, then run a prefill of a whole batch and a decode, before any block has an owner.

        The first steps of a process take seconds: code is made for the shapes that they meet, weights are paged in.
        """
        with torch.inference_mode():
            for num_rows in row_sizes(self._max_tokens) if self.forward.operations.pads_rows else ():
                self.forward.warm_up(num_rows)
        size = self._cache.geometry.block_size
        num_blocks = min(self._cache.num_blocks, self._max_tokens // size + 1)
        prompt = [0] * max(1, min(self._max_tokens, num_blocks * size - 1, self.info.max_model_len - 1))
        request = Request("warm-up", prompt, len(prompt), Sampling(max_tokens=2, seed=0), block_table=list(range(num_blocks)))
        for _ in range(2):
            start = time.monotonic()
            (sample,) = self.execute(Batch((Scheduled(request, request.num_tokens - request.num_computed_tokens),)))
            if not isinstance(sample, Sample):
                raise ModelError(f"the model computes no token after token 0 repeated {len(prompt)} times: {sample}")
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(sample.token_id)
            self.longest_warm_up_seconds = max(self.longest_warm_up_seconds, time.monotonic() - start)
        self.forget(request.request_id)


def make_runner(loaded: LoadedModel, cache: KVCache | DeviceKVCache, engine: EngineConfig) -> Runner:
    """A runner of this model, over this cache.  The model's own weights are dropped where they are packed."""
    limits = StepLimits(engine.max_batched_tokens, engine.max_sequences, loaded.info.max_model_len, cache.geometry.block_size)
    forward = assemble(loaded, cache, limits, invariant=engine.batch_invariant)
    return Runner(loaded.info, forward, cache, limits)


def open_runner(
    model: ModelConfig, engine: EngineConfig, device: str = "cpu", asked: Asked | None = None
) -> tuple[Runner, KVCache | DeviceKVCache, ModelInfo]:
    """Load the model and reserve its KV cache on `device`, cpu or cuda, as the engine process does at start.  Raises ModelError.

    asked: what transformers was asked about the model before torch was imported.
    """
    dtype = read_native_dtype() if model.dtype == "auto" else model.dtype
    question = Question(Path(model.path).expanduser(), dtype, engine.max_model_len, engine.threads)
    loaded = open_model(question, engine.block_size, asked)
    info = loaded.info
    cache = open_cache(info.geometry, engine, torch.device(device), vocab_size=info.vocab_size, weight_bytes=loaded.weight_bytes)
    if cache.num_blocks * engine.block_size < info.max_model_len:
        logger.warning(
            "KV blocks hold one request of %d tokens, not of engine.maxModelLen (%d): longer ones fail; that takes %d bytes",
            cache.num_blocks * engine.block_size,
            info.max_model_len,
            -(-info.max_model_len // engine.block_size) * cache.block_bytes,
        )
    try:
        try:
            runner = make_runner(loaded, cache, engine)
        except NotOursError as e:
            logger.warning("transformers' kept answer does not fit the model, which is loaded by its code: %s", e)
            forget(question)
            loaded = by_transformers(question, engine.block_size)
            runner = make_runner(loaded, cache, engine)
    except (MemoryError, RuntimeError) as e:  # torch raises the latter, and names the bytes
        if not isinstance(e, MemoryError) and "memory" not in str(e):
            raise
        raise ModelError(f"no memory for packed weights of {loaded.weight_bytes} bytes beside the model: {e}") from e
    del loaded  # and with it the weights that are packed now
    gc.collect()
    give_back_freed_memory()
    start = time.monotonic()
    runner.warm_up()
    logger.info("warmed up seconds=%.1f", time.monotonic() - start)
    return runner, cache, info
