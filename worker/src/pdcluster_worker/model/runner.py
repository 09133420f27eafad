"""Runs a batch: plan, one forward pass over all tokens, sampling.

Running the same items again gives the same keys, values and tokens.
"""

import ctypes
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from pdcluster_worker.config.worker import RuntimeAdaptersConfig
from pdcluster_worker.engine.in_flight import verified
from pdcluster_worker.engine.ports import RowOutcome, Sample, StepSeconds, execute
from pdcluster_worker.engine.request import (
    Batch,
    EngineRequest,
    SamplePlace,
    Scheduled,
    sample_places,
)
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.decoder import Decoder, Forward
from pdcluster_worker.model.kv_cache import DeviceKVCache, KVCache
from pdcluster_worker.model.loading.adapter import AdapterTarget
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.model.parallel.device_parts import RanksDeviceCache
from pdcluster_worker.model.prompt_logprobs import PromptLogprobs, PromptRow, prompt_rows
from pdcluster_worker.model.runtime_adapters import RuntimeAdapters
from pdcluster_worker.model.sampling.sampler import Sampler
from pdcluster_worker.model.step_plan import StepLimits, StepPlan, StepPlanner, row_sizes
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.structured_output.masks import MaskMaker, Masks
from pdcluster_worker.system.cpu_cores import SharedCores

logger = logging.getLogger(__name__)

Cache = KVCache | DeviceKVCache | RanksDeviceCache


class StepThreads:
    """CPU threads of steps: a runner's own."""

    def take(self) -> None:
        """Called before each step."""

    def rest(self) -> None:
        """Until the next step."""

    def close(self) -> None:
        pass


class SharedThreads(StepThreads):
    """Own threads plus those of idle cores of other engines of the machine.

    The kernels check the number after each layer, so a lender waits for a layer and not for a step.
    """

    def __init__(self, cores: SharedCores, kernels: Kernels) -> None:
        self._cores = cores
        self._threads = torch.get_num_threads()
        self._bound = kernels.library.bound
        self._bound(ctypes.c_void_p(cores.address))

    def take(self) -> None:
        threads = self._cores.take()
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def rest(self) -> None:
        self._cores.rest()

    def close(self) -> None:
        self._bound(None)
        self._cores.rest()


@dataclass(slots=True)
class PreparedStep:
    batch: Batch
    plan: StepPlan
    unknown: list[tuple[int, EngineRequest]]  # rows whose token the previous step samples
    prompt_rows: list[PromptRow]  # to score
    places: list[SamplePlace]  # where tokens are sampled
    seconds: float  # to make the inputs
    masks: "Future[Masks] | None" = None
    logits: "Future[tuple[Tensor, float]] | None" = None


class Runner:
    """longest_warm_up_seconds: of a step.  kv_channels: to other ranks that transfer KV.

    depth: batches that are submitted at a time; a pass on a GPU is only launched.
    """

    def __init__(
        self,
        info: ModelInfo,
        forward: Forward,
        cache: Cache,
        limits: StepLimits,
        *,
        depth: int = 1,
        in_thread: bool = False,
    ) -> None:
        """in_thread: passes run in a thread, so that the next batch is planned meanwhile."""
        self.info = info
        self.seconds = StepSeconds()
        self.longest_warm_up_seconds = 0.0
        self.forward = forward
        self.kv_channels: Sequence[socket.socket] = ()
        self.threads = StepThreads()
        self.adapters: RuntimeAdapters | None = None
        self.adapter_places = {name: place for place, name in enumerate(info.adapters)}
        self.depth = depth
        self._pool: ThreadPoolExecutor | None = None
        if in_thread:  # OpenMP and torch keep a number for each thread that begins products
            self._pool = ThreadPoolExecutor(
                1, "forward", torch.set_num_threads, (torch.get_num_threads(),)
            )
        self._cache = cache
        self._max_tokens = limits.max_tokens
        # A plan is read until its step has ended: each step in flight has a planner's arrays.
        self._planners = deque(
            _planner(limits, self.adapter_places, pads=forward.operations.pads_rows)
            for _ in range(self.depth)
        )
        self.grammars = GrammarCache(info.vocab_size)
        self._masks = MaskMaker(self.grammars, info.vocab_size)
        self._row_ops = forward.operations.row_ops
        self._sampler = Sampler(info.vocab_size, self._row_ops)
        self._prompts = PromptLogprobs(self._row_ops)

    def prepare(self, batch: Batch) -> PreparedStep:
        """Plan the batch, and find the rows whose tokens are not known yet."""
        started = time.monotonic()
        self._planners.rotate(1)
        plan = self._planners[0].plan(batch)
        places = [place for item in batch.items if item.samples for place in sample_places(item)]
        unknown, rows = _unknown_rows(batch), prompt_rows(batch)
        return PreparedStep(batch, plan, unknown, rows, places, time.monotonic() - started)

    def begin(self, step: PreparedStep, sampled: Mapping[EngineRequest, int]) -> None:
        """Begin the forward pass; masks are filled beside it."""
        if step.unknown:
            token_ids = step.plan.token_ids.numpy()
            for row, request in step.unknown:
                token_ids[row] = sampled.get(request, 0)
        chosen = {request: sampled[request] for _, request in step.unknown if request in sampled}
        step.masks = self._masks.begin(step.places, chosen)

        if self._pool is not None:
            step.logits = self._pool.submit(self._forward, step)
            return
        step.logits = Future()
        try:
            step.logits.set_result(self._forward(step))
        except Exception as e:
            step.logits.set_exception(e)

    def _forward(self, step: PreparedStep) -> tuple[Tensor, float]:
        started = time.monotonic()
        self.threads.take()
        with torch.inference_mode():
            rows = step.prompt_rows
            logits = (
                self._prompts.logits(self.forward, step.plan, rows)
                if rows
                else self.forward.logits(step.plan)
            )
        return logits, time.monotonic() - started

    def wait(self, step: PreparedStep) -> list[RowOutcome]:
        """Wait for the logits, and choose tokens.

        A request whose logits are not finite, or whose sampling leaves no token, fails alone.
        """
        try:
            return self._outcomes(step)
        except BaseException:
            if step.masks is not None:
                step.masks.exception()  # the next step feeds the same matchers
            raise

    def _outcomes(self, step: PreparedStep) -> list[RowOutcome]:
        assert step.logits is not None, "a step begins before it is waited for"
        logits, seconds = step.logits.result()
        started = time.monotonic()
        with torch.inference_mode():
            logits = self._row_ops.receive(logits)
            computed = time.monotonic()
            masks = None if step.masks is None else step.masks.result()
            rows = iter(self._sampler.sample(logits, step.places, masks) if step.places else ())
        self.seconds = StepSeconds(
            step.seconds, seconds + computed - started, time.monotonic() - computed
        )
        # Of an item with drafts, one row more for each.
        outcomes = [
            verified(item.drafts, list(islice(rows, 1 + len(item.drafts))))
            if item.samples
            else None
            for item in step.batch.items
        ]
        return [
            self._prompts.of(item.request, outcome)
            for item, outcome in zip(step.batch.items, outcomes, strict=True)
        ]

    def execute(self, batch: Batch) -> Sequence[RowOutcome]:
        return execute(self, batch)

    def forget(self, request_id: str) -> None:
        """Unknown ids are a no-op."""
        for planner in self._planners:
            planner.forget(request_id)
        self._sampler.forget(request_id)
        self.grammars.forget(request_id)
        self._prompts.forget(request_id)

    def allow_adapters(self, settings: RuntimeAdaptersConfig, target: AdapterTarget) -> None:
        """From now on adapters may come and go."""
        assert isinstance(self.forward, Decoder), "adapters are of our own decoder"
        self.adapters = RuntimeAdapters(settings, target, self.forward, self.adapter_places)

    def close(self) -> None:
        """Waits for the running step; ends other ranks."""
        if self._pool is not None:
            self._pool.shutdown()
        self._masks.close()
        self.grammars.close()
        self.forward.close()

    def warm_up(self) -> None:
        """Compile all padded sizes, then run a prefill and a decode; no block may have an owner."""
        with torch.inference_mode():
            for num_rows in (
                row_sizes(self._max_tokens) if self.forward.operations.pads_rows else ()
            ):
                self.forward.warm_up(num_rows)
        size = self._cache.geometry.block_size
        num_blocks = min(self._cache.num_blocks, self._max_tokens // size + 1)
        prompt = [0] * max(
            1, min(self._max_tokens, num_blocks * size - 1, self.info.max_model_len - 1)
        )
        request = EngineRequest(
            "warm-up",
            prompt,
            len(prompt),
            SamplingParams(max_tokens=2, seed=0),
            block_table=list(range(num_blocks)),
        )
        for _ in range(2):
            start = time.monotonic()
            (sample,) = self.execute(
                Batch((Scheduled.of(request, request.num_tokens - request.num_computed_tokens),))
            )
            if not isinstance(sample, Sample):
                raise ModelError(
                    f"the model computes no token after token 0 repeated {len(prompt)} times: "
                    f"{sample}"
                )
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(sample.token_id)
            self.longest_warm_up_seconds = max(
                self.longest_warm_up_seconds, time.monotonic() - start
            )
        self.forget(request.request_id)


def share_threads(cores: SharedCores | None, runners: Sequence[Runner]) -> StepThreads:
    """Only our decoder's kernels give threads back within a step; other engines keep their own."""
    kernels = find_kernels()
    threads = StepThreads()
    is_ours = all(runner.forward.code == Decoder.code for runner in runners)
    if cores is not None and is_ours and isinstance(kernels, Kernels):
        threads = SharedThreads(cores, kernels)
        logger.info("shares cores own=%d most=%d", cores.own, cores.most)
    for runner in runners:
        runner.threads = threads
    return threads


def _planner(limits: StepLimits, adapters: Mapping[str, int], *, pads: bool) -> StepPlanner:
    """Raises ModelError where its arrays do not fit into memory."""
    try:
        return StepPlanner(limits, pads=pads, adapters=adapters)
    except MemoryError as e:
        raise ModelError(
            f"no memory for the arrays of a step ({e}): engine.maxBatchedTokens is "
            f"{limits.max_tokens}, and engine.maxSequences is {limits.max_sequences}, each of "
            f"{limits.blocks} KV blocks: lower them, or engine.maxModelLen"
        ) from e


def _unknown_rows(batch: Batch) -> list[tuple[int, EngineRequest]]:
    """(row, request) of tokens not known when the batch is planned, at most one per request."""
    ends = accumulate(item.num_tokens for item in batch.items)
    return [
        (end - 1, item.request)
        for item, end in zip(batch.items, ends, strict=True)
        if item.end - len(item.drafts) > item.request.num_tokens
    ]
