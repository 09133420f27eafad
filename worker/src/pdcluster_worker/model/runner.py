"""Runs a batch: plan, one forward pass over all its tokens, one sample for each request that is up to date.

`Runner` is the engine's `ModelRunner`.  It knows a request's tokens, block
table and sampling, and nothing of queues, transfers or clients.  Running the
same items again writes the same keys and values and chooses the same tokens.
"""

import gc
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path

import torch
from torch import Tensor

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.model import ModelConfig
from pdcluster_worker.engine.batch import Batch, SamplePlace, Scheduled, sample_places
from pdcluster_worker.engine.ports import RowOutcome, Sample, StepSeconds, verified
from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import ModelError
from pdcluster_worker.grammar.book import GrammarBook
from pdcluster_worker.grammar.masks import MaskMaker, Masks
from pdcluster_worker.machine.native_dtype import read_native_dtype
from pdcluster_worker.messages.requests import Sampling
from pdcluster_worker.model.assembly import assemble
from pdcluster_worker.model.beginning import AtOnce, Beginning, InThread
from pdcluster_worker.model.device_cache import DeviceKVCache, open_cache
from pdcluster_worker.model.families import NotOursError
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.answers import Asked, Question, forget
from pdcluster_worker.model.loading.loader import LoadedModel, ModelInfo
from pdcluster_worker.model.opening import by_transformers, open_model
from pdcluster_worker.model.ops.freed_memory import give_back_freed_memory
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.parallel.device_parts import RanksDeviceCache
from pdcluster_worker.model.parallel.opening import open_ranks
from pdcluster_worker.model.parallel.ranks import OnDeath, Ranks, rank_threads
from pdcluster_worker.model.pool_length import fit_length
from pdcluster_worker.model.prompt_logprobs import PromptLogprobs, PromptRow, prompt_rows
from pdcluster_worker.model.sampling.sampler import Sampler
from pdcluster_worker.model.step_plan import StepPlan, StepPlanner, row_sizes

logger = logging.getLogger(__name__)

Cache = KVCache | DeviceKVCache | RanksDeviceCache


@dataclass(slots=True)
class _Step:
    """A batch that was submitted.

    unknown: its rows whose tokens are those that the step before samples, and their requests.
    prompt_rows: its rows that give log probabilities of prompts.
    places: after which tokens one is sampled.  masks: of these, where some are constrained.
    seconds: of making its inputs.  logits: of its forward pass, once that has begun.
    """

    batch: Batch
    plan: StepPlan
    unknown: list[tuple[int, Request]]
    prompt_rows: list[PromptRow]
    places: list[SamplePlace]
    seconds: float
    masks: "Future[Masks] | None" = None
    logits: "Future[tuple[Tensor, float]] | None" = None


class Runner:
    """A loaded model over its KV cache.

    forward: what computes its layers.  longest_warm_up_seconds: of the steps of `warm_up`.
    seconds, depth: see `engine.ports.ModelRunner`.
    kv_lines: to the other ranks of the engine that move KV of their own (`transfer.rank_port`).
    """

    def __init__(self, info: ModelInfo, forward: Forward, cache: Cache, limits: StepLimits, beginning: Beginning | None = None) -> None:
        self.info = info
        self.seconds = StepSeconds()
        self.longest_warm_up_seconds = 0.0
        self.forward = forward
        self.kv_lines: Sequence[socket.socket] = ()
        self._beginning: Beginning = beginning or AtOnce()
        self.depth = self._beginning.depth
        self._cache = cache
        self._steps: deque[_Step] = deque()
        self._max_tokens = limits.max_tokens
        # A plan is read until its step has ended: each step under way has a planner's arrays.
        self._planners = deque(
            StepPlanner(
                block_size=limits.block_size,
                max_sequences=limits.max_sequences,
                max_tokens=limits.max_tokens,
                max_decode_rows=limits.max_decode_rows,
                max_blocks=limits.blocks,
                pads=forward.operations.pads_rows,
            )
            for _ in range(self.depth)
        )
        self.grammars = GrammarBook(info.vocab_size)
        self._masks = MaskMaker(self.grammars, info.vocab_size)
        self._sampler = Sampler(info.vocab_size, forward.operations.choosing)
        self._prompts = PromptLogprobs(forward.operations.choosing.rank)

    def submit(self, batch: Batch) -> None:
        """Plan the batch; its forward pass begins now, or when the step before has its tokens.  See `engine.ports.ModelRunner`."""
        started = time.monotonic()
        self._planners.rotate(1)
        plan = self._planners[0].plan(batch)
        places = [place for item in batch.items if item.samples for place in sample_places(item)]
        step = _Step(batch, plan, _unknown_rows(batch), prompt_rows(batch), places, time.monotonic() - started)
        self._steps.append(step)
        if len(self._steps) == 1:
            self._begin(step, {})

    def wait(self) -> list[RowOutcome]:
        """Wait for the logits, choose tokens, and begin the step after; see `engine.ports.ModelRunner`.

        A request whose logits are not finite, or whose sampling leaves no token, fails alone.
        """
        step = self._steps.popleft()
        try:
            outcomes = self._outcomes(step)
        except BaseException:
            self._steps.clear()  # what was submitted since has not begun
            if step.masks is not None:
                step.masks.exception()  # waited for: what comes next feeds the same followers
            raise
        if self._steps:
            following = self._steps[0]
            chosen = {
                item.request: outcome.token_id
                for item, outcome in zip(step.batch.items, outcomes, strict=True)
                if isinstance(outcome, Sample)
            }
            token_ids = following.plan.token_ids.numpy()
            for row, request in following.unknown:
                token_ids[row] = chosen.get(request, 0)
            self._begin(following, {request: chosen[request] for _, request in following.unknown if request in chosen})
        return outcomes

    def _begin(self, step: _Step, chosen: Mapping[Request, int]) -> None:
        """chosen: tokens of the step before, which their requests have not yet.  Masks are filled beside the forward pass."""
        step.masks = self._masks.begin(step.places, chosen)

        def forward() -> tuple[Tensor, float]:
            started = time.monotonic()
            with torch.inference_mode():
                rows = step.prompt_rows
                logits = self._prompts.logits(self.forward, step.plan, rows) if rows else self.forward.logits(step.plan)
            return logits, time.monotonic() - started

        step.logits = self._beginning.begin(forward)

    def _outcomes(self, step: _Step) -> list[RowOutcome]:
        assert step.logits is not None, "a step begins before it is waited for"
        logits, seconds = step.logits.result()
        started = time.monotonic()
        with torch.inference_mode():
            logits = logits.cpu()  # tokens are chosen in host memory
            computed = time.monotonic()
            masks = None if step.masks is None else step.masks.result()
            rows = iter(self._sampler.sample(logits, step.places, masks) if step.places else ())
        self.seconds = StepSeconds(step.seconds, seconds + computed - started, time.monotonic() - computed)
        # Of an item with drafts, one row more for each.
        outcomes = [verified(item.drafts, list(islice(rows, 1 + len(item.drafts)))) if item.samples else None for item in step.batch.items]
        return [self._prompts.of(item.request, outcome) for item, outcome in zip(step.batch.items, outcomes, strict=True)]

    def execute(self, batch: Batch) -> list[RowOutcome]:
        """Submit the batch and wait for it."""
        self.submit(batch)
        return self.wait()

    def forget(self, request_id: str) -> None:
        """Drop what is kept for this request; unknown ids are a no-op."""
        for planner in self._planners:
            planner.forget(request_id)
        self._sampler.forget(request_id)
        self.grammars.forget(request_id)
        self._prompts.forget(request_id)

    def close(self) -> None:
        """End the other ranks, where there are some, after the step under way."""
        self._beginning.close()
        self._masks.close()
        self.grammars.close()
        self.forward.close()

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
            (sample,) = self.execute(Batch((Scheduled.of(request, request.num_tokens - request.num_computed_tokens),)))
            if not isinstance(sample, Sample):
                raise ModelError(f"the model computes no token after token 0 repeated {len(prompt)} times: {sample}")
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(sample.token_id)
            self.longest_warm_up_seconds = max(self.longest_warm_up_seconds, time.monotonic() - start)
        self.forget(request.request_id)


def _unknown_rows(batch: Batch) -> list[tuple[int, Request]]:
    """Rows of tokens that are not known when the batch is planned, each its request's only one."""
    ends = accumulate(item.num_tokens for item in batch.items)
    return [
        (end - 1, item.request)
        for item, end in zip(batch.items, ends, strict=True)
        if item.end - len(item.drafts) > item.request.num_tokens
    ]


def make_runner(loaded: LoadedModel, cache: KVCache | DeviceKVCache, engine: EngineConfig) -> Runner:
    """A runner of this model, over this cache.  The model's own weights are dropped where they are packed.

    A GPU's next step is planned while it computes; on a CPU that would take a core from the kernels (docs/scheduling.md).
    """
    limits = _limits(loaded, engine)
    forward = assemble(loaded, cache, limits, invariant=engine.batch_invariant)
    return Runner(loaded.info, forward, cache, limits, AtOnce(depth=2 if cache.tensor.is_cuda else 1))


def _limits(loaded: LoadedModel, engine: EngineConfig) -> StepLimits:
    return StepLimits(engine.max_batched_tokens, engine.max_sequences, loaded.info.max_model_len, engine.block_size, engine.max_decode_rows)


def open_runner(
    model: ModelConfig, engine: EngineConfig, device: str = "cpu", *, asked: Asked | None = None, on_rank_death: OnDeath = logger.error
) -> tuple[Runner, Cache, ModelInfo]:
    """Load the model and reserve its KV cache on `device`, cpu or cuda, as the engine process does at start.  Raises ModelError.

    asked: what transformers was asked about the model before torch was imported.
    on_rank_death: called with the reason, from a thread, when one of the engine's other ranks has ended by itself.
    """
    if engine.tensor_parallel_size * engine.pipeline_parallel_size == 1:
        return _open(model, engine, device, None, asked)
    ranks = Ranks(model, engine, device, on_rank_death)
    try:
        return _open(model, engine, device, ranks, None)
    except BaseException:
        ranks.close()
        raise


def _open(
    model: ModelConfig, engine: EngineConfig, device: str, ranks: Ranks | None, asked: Asked | None
) -> tuple[Runner, Cache, ModelInfo]:
    """Ranks divide a module of transformers' own: an answer is for an engine of one process."""
    dtype = read_native_dtype() if model.dtype == "auto" else model.dtype
    threads = engine.threads if ranks is None else rank_threads(engine)
    question = Question(Path(model.path).expanduser(), dtype, engine.max_model_len, threads)
    loaded = open_model(question, engine.block_size, asked) if ranks is None else by_transformers(question, engine.block_size)
    try:
        runner, cache = _make(loaded, question, engine, device) if ranks is None else _make_over(ranks, loaded, engine, device)
    except (MemoryError, RuntimeError) as e:  # torch raises the latter, and names the bytes
        if not isinstance(e, MemoryError) and "memory" not in str(e):
            raise
        raise ModelError(f"no memory for packed weights of {loaded.weight_bytes} bytes beside the model: {e}") from e
    runner.grammars.folder = question.path
    del loaded  # and with it the weights that are packed now
    gc.collect()
    give_back_freed_memory()
    start = time.monotonic()
    runner.warm_up()
    logger.info("warmed up seconds=%.1f", time.monotonic() - start)
    return runner, cache, runner.info


def _make(loaded: LoadedModel, question: Question, engine: EngineConfig, device: str) -> tuple[Runner, Cache]:
    """A runner in this process.  An answer that does not fit the model is forgotten, and transformers' code loads it."""
    info = loaded.info
    cache = open_cache(info.geometry, engine, torch.device(device), vocab_size=info.vocab_size, weight_bytes=loaded.weight_bytes)
    info = fit_length(info, cache, engine)
    try:
        return make_runner(replace(loaded, info=info), cache, engine), cache
    except NotOursError as e:
        logger.warning("transformers' kept answer does not fit the model, which is loaded by its code: %s", e)
    forget(question)
    loaded = by_transformers(question, engine.block_size)
    return make_runner(replace(loaded, info=info), cache, engine), cache


def _make_over(ranks: Ranks, loaded: LoadedModel, engine: EngineConfig, device: str) -> tuple[Runner, Cache]:
    """A runner over several ranks, whose step rank 0 waits for in a thread of its own."""
    limits = _limits(loaded, engine)
    shared, forward = open_ranks(loaded, engine, limits, ranks, device)
    runner = Runner(fit_length(loaded.info, shared, engine), forward, shared, limits, InThread())
    runner.kv_lines = ranks.kv_lines
    return runner, shared
