"""Runs a batch: plan, one forward pass over all its tokens, one sample for each request that is up to date.

`Runner` is the engine's `ModelRunner`.  It knows a request's tokens, block
table and sampling, and nothing of queues, transfers or clients.  Running the
same items again writes the same keys and values and chooses the same tokens.
"""

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from pdcluster_worker.config import EngineConfig, ModelConfig
from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.ports import Sample, StepSeconds
from pdcluster_worker.engine.request import Request
from pdcluster_worker.model.attention import PagedAttention
from pdcluster_worker.model.inputs import StepInputs, build_inputs
from pdcluster_worker.model.kv_cache import KVCache, blocks_that_fit
from pdcluster_worker.model.loader import LoadedModel, ModelInfo, load_model
from pdcluster_worker.model.sampler import Sampler

logger = logging.getLogger(__name__)


class Runner:
    """A loaded model over its KV cache.  longest_warm_up_seconds: of the steps of `warm_up`."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self.info = model.info
        self._module = model.module
        self._cache = cache
        self.seconds = StepSeconds()
        self._sampler = Sampler(model.info.vocab_size)
        self.longest_warm_up_seconds = 0.0

    def execute(self, batch: Batch) -> list[Sample | None]:
        """Compute the batch; see `engine.ports.ModelRunner`.

        Raises ValueError when one request's logits are not finite or its sampling
        names tokens that do not exist, and whatever else the model raises.
        """
        if not batch.items:
            return []
        started = time.monotonic()
        inputs = build_inputs(batch, self._cache)
        with torch.inference_mode():
            self._cache.clear(inputs.opened)
            built = time.monotonic()
            logits = self._forward(inputs)
            computed = time.monotonic()
            sampled = [item.request for item in batch.items if item.samples]
            samples = iter(self._sampler.sample(logits, sampled) if sampled else ())
        self.seconds = StepSeconds(built - started, computed - built, time.monotonic() - computed)
        return [next(samples) if item.samples else None for item in batch.items]

    def forget(self, request_id: str) -> None:
        """Drop what is kept for this request; unknown ids are a no-op."""
        self._sampler.forget(request_id)

    def warm_up(self, num_tokens: int) -> None:
        """Run a prefill of about `num_tokens` and a decode step, before any block has an owner.

        The first steps of a process take seconds: kernels are made for the shapes that they meet, weights are paged in.
        """
        size = self._cache.geometry.block_size
        num_blocks = min(self._cache.num_blocks, num_tokens // size + 1)
        prompt = [0] * max(1, min(num_tokens, num_blocks * size - 1, self.info.max_model_len - 1))
        request = Request("warm-up", prompt, len(prompt), Sampling(max_tokens=2, seed=0), block_table=list(range(num_blocks)))
        for _ in range(2):
            start = time.monotonic()
            (sample,) = self.execute(Batch((Scheduled(request, request.num_tokens - request.num_computed_tokens),)))
            assert sample is not None
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(sample.token_id)
            self.longest_warm_up_seconds = max(self.longest_warm_up_seconds, time.monotonic() - start)
        self.forget(request.request_id)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Logits of the places that sample, [R, vocab_size] in float32."""
        # logits_to_keep leaves scaling and capping of logits to the model's own code.
        out = self._module(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.sample_at,
            attend=PagedAttention(inputs, self._cache),
        )
        logits: Tensor = out.logits[0].float()
        return logits


def open_runner(model: ModelConfig, engine: EngineConfig) -> tuple[Runner, KVCache, ModelInfo]:
    """Load the model and reserve its KV cache, as the engine process does at start.  Raises ModelError."""
    loaded = load_model(
        Path(model.path).expanduser(),
        model.dtype,
        block_size=engine.block_size,
        max_model_len=engine.max_model_len,
        threads=engine.threads,
    )
    cache = KVCache(loaded.info.geometry, engine.num_blocks or blocks_that_fit(loaded.info.geometry, engine.kv_cache_memory))
    runner = Runner(loaded, cache)
    start = time.monotonic()
    runner.warm_up(engine.max_batched_tokens)
    logger.info("warmed up seconds=%.1f", time.monotonic() - start)
    return runner, cache, loaded.info
