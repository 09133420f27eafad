"""Compares our decoder's logits with transformers' at every load, before it serves.

A missing part (bias, scale, rotation) differs far more than rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.generic import Generic
from pdcluster_worker.model.kv_cache import DTYPES, KVCache
from pdcluster_worker.model.loading.loader import LoadedModel, ModelInfo
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.step_plan import StepPlanner

LONG, SHORT = 21, 6  # tokens of the two sequences; the last of each is a decode step

BLOCK_SIZE = 16  # for transformers' logits, which do not depend on it

# relative to the logits' norm: rounding in another order, with margin
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.08}


def expected_logits(loaded: LoadedModel) -> Tensor:
    """Logits of every token of both sequences, [tokens, vocab_size] in the model's dtype."""
    info = loaded.info
    size = info.geometry.block_size
    cache = KVCache(info.geometry, num_blocks(size))
    lengths = _lengths(info.max_model_len)
    computed = _logits(
        Generic(loaded.module, Reference(cache.tensor, loaded.attention)),
        lengths,
        size,
        info.vocab_size,
    )
    return torch.cat(computed).to(DTYPES[info.dtype])  # nothing is lost: they were rounded to that


def logits_difference(ours: Forward, theirs: Tensor, info: ModelInfo, num_blocks: int) -> float:
    """Relative norm of the difference; NaN counts as infinite.

    Overwrites the first `num_blocks` blocks of our KV cache: none may have an owner yet.
    """
    block_size = info.geometry.block_size
    short = min(SHORT, len(theirs) // 2)
    long = len(theirs) - short
    limit = info.max_model_len
    lengths = min(long, limit, (num_blocks - 1) * block_size), min(short, limit, block_size)
    mine = torch.cat(_logits(ours, lengths, block_size, info.vocab_size))
    expected = torch.cat((theirs[: lengths[0]], theirs[long : long + lengths[1]])).float()
    found = float((mine - expected).norm() / expected.norm())
    return found if found == found else float("inf")


def num_blocks(block_size: int) -> int:
    return -(-LONG // block_size) + -(-SHORT // block_size)


def _lengths(max_tokens: int) -> tuple[int, int]:
    return min(LONG, max_tokens), min(SHORT, max_tokens)


def _logits(
    forward: Forward, lengths: Sequence[int], block_size: int, vocab_size: int
) -> list[Tensor]:
    """Logits of every token of both sequences, [length, vocab_size] each."""
    requests = _requests(lengths, block_size, vocab_size)
    num_blocks = max(len(request.block_table) for request in requests)
    planner = StepPlanner(
        block_size=block_size,
        max_sequences=len(lengths),
        max_tokens=sum(lengths),
        max_blocks=num_blocks,
    )
    rows: dict[str, list[Tensor]] = {request.request_id: [] for request in requests}
    for counts in ([length - 1 for length in lengths], [1] * len(lengths)):
        items = [
            Scheduled.of(request, count)
            for request, count in zip(requests, counts, strict=True)
            if count
        ]
        if not items:
            continue
        plan = planner.plan(Batch(tuple(items)))
        with torch.inference_mode():
            logits = forward.logits(replace(plan, sample_at=torch.arange(plan.num_tokens)))
            # they hold until the next step
            parts = torch.split(logits.cpu().clone(), [item.num_tokens for item in items])
        for item, part in zip(items, parts, strict=True):
            rows[item.request.request_id].append(part)
            item.request.num_computed_tokens += item.num_tokens
    return [torch.cat(parts) for parts in rows.values()]


def _requests(lengths: Sequence[int], block_size: int, vocab_size: int) -> list[EngineRequest]:
    requests, first = [], 0
    for number, length in enumerate(lengths):
        tokens = [(7919 * (place + 1) + 31 * number) % vocab_size for place in range(length)]
        last = first - (-length // block_size)
        sampling = SamplingParams(max_tokens=1, seed=0)
        requests.append(
            EngineRequest(
                f"proof-{number}", tokens, length, sampling, block_table=list(range(first, last))
            )
        )
        first = last
    return requests
