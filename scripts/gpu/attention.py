"""Attention of one layer by other tile sizes and by other kernels, over the same paged cache.

The peer is FlashAttention 3 with block tables, where the pack has it; `torch` is what
production takes for long whole prompts.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from setting import DEVICE, REHEARSES, SITE, save, seconds
from stack import BLOCK_SIZE, DECODES, LARGE, PROMPTS, plan_of
from torch import Tensor

from pdcluster_worker.model.ops.graphs import PlanCopy
from pdcluster_worker.model.ops.paged_attention import (
    AttentionSizes,
    TorchAttention,
    TritonAttention,
)
from pdcluster_worker.model.step_plan import StepLimits, StepPlan

SHAPE = LARGE.shape
LONGEST = 48 if REHEARSES else 131072
LAYERS = 1 if REHEARSES else 8
"""Enough that no layer's keys are still in the device's cache when its turn comes again."""

DECODE_SIZES = ("split_keys", "key_block", "stages", "warps")
DECODE_VARIANTS = (
    (256, 64, 2, 4),
    (256, 64, 2, 2),
    (256, 64, 3, 4),
    (256, 64, 3, 2),
    (256, 64, 5, 4),
    (256, 64, 5, 2),
    (256, 64, 7, 4),
    (256, 32, 3, 1),
    (256, 32, 3, 2),
    (256, 32, 5, 1),
    (256, 32, 5, 2),
    (256, 32, 7, 2),
    (256, 16, 5, 1),
    (256, 128, 3, 4),
    (512, 64, 3, 2),
    (512, 64, 5, 4),
)
CHUNK_SIZES = ("chunk_rows", "key_block", "stages", "warps")
CHUNK_VARIANTS = ((64, 64, 2, 4), (128, 64, 3, 8))
CHUNKS = ((32, 32), (32, 48)) if REHEARSES else ((2048, 2048), (8192, 8192), (2048, 8192))
"""Rows and context."""

Attend = Callable[[Tensor, StepPlan, int], object]


@torch.inference_mode()
def main() -> int:
    """Time each way; a size that does not compile is noted and passes."""
    contexts = (*DECODES, *((1, context) for _, context in CHUNKS))
    tokens = max(batch * context for batch, context in contexts)
    size = (tokens // BLOCK_SIZE + 8, SHAPE.num_kv_heads, LAYERS, 2, BLOCK_SIZE, SHAPE.head_dim)
    cache = torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_()
    limits = StepLimits(max(PROMPTS), max(batch for batch, _ in DECODES), LONGEST, BLOCK_SIZE)
    copy = PlanCopy(cache.device, limits)
    fa3 = _flash_attention_3(cache)
    figures: dict[str, Any] = {}
    for batch, context in DECODES:
        ways = _variants(cache, DECODE_SIZES, DECODE_VARIANTS) | fa3
        plan = copy.place(plan_of([context] * batch, 1))
        _measure(figures, f"decode {batch} x {context}", ways, plan)
    for rows, context in CHUNKS:
        ways = _variants(cache, CHUNK_SIZES, CHUNK_VARIANTS) | fa3
        ways["torch"] = _torch(cache, plan_of([context], rows))
        plan = copy.place(plan_of([context], rows))
        _measure(figures, f"chunk of {rows}, context {context}", ways, plan)
    return 0


def _variants(
    cache: Tensor, names: tuple[str, ...], variants: tuple[tuple[int, ...], ...]
) -> dict[str, Attend]:
    found: dict[str, Attend] = {}
    for variant in variants:
        changes = dict(zip(names, variant, strict=True))
        sizes = AttentionSizes.of(SHAPE, cache.dtype, LONGEST)
        if "split_keys" in changes:
            more = (sizes.split_keys << sizes.doublings) // changes["split_keys"]
            changes |= {"doublings": more.bit_length() - 1, "max_splits": 32}
        name = ", ".join(f"{name} {value}" for name, value in zip(names, variant, strict=True))
        found[name] = TritonAttention(cache, SHAPE, replace(sizes, **changes)).attend
    return found


def _torch(cache: Tensor, plan: StepPlan) -> Attend:
    """As production runs it; plan: on the host."""
    sizes = AttentionSizes.of(SHAPE, cache.dtype, LONGEST)
    attention = TorchAttention(cache, SHAPE, sizes)
    attention.begin(plan)
    return attention.attend


def _flash_attention_3(cache: Tensor) -> dict[str, Attend]:
    """By its operator as a library; the cache's layout needs no copy."""
    library = SITE / "_vllm_fa3_C.abi3.so"
    if REHEARSES or not library.exists():
        return {}
    torch.ops.load_library(str(library))
    heads, dim = SHAPE.num_heads, SHAPE.head_dim

    def attend(qkv: Tensor, plan: StepPlan, layer: int) -> object:
        query = qkv[:, : heads * dim].view(-1, heads, dim)
        keys, values = (cache[:, :, layer, part].transpose(1, 2) for part in range(2))
        count, rows = len(plan.firsts), len(qkv) // len(plan.firsts)
        starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * rows
        width = -(-plan.longest // BLOCK_SIZE)
        table = plan.tables[plan.table_rows.long()][:, :width].contiguous()
        none = None
        return torch.ops._vllm_fa3_C.fwd(
            *(query, keys, values, none, none, none, torch.empty_like(query), starts, none, none),
            *(none, plan.contexts, rows, plan.longest, table, none, none, none, none, none),
            *(none, none, none, SHAPE.scaling, True, -1, -1, 0.0, False, none, 0, none, 0),
            *(none, 1, 0, none),
        )

    return {"FlashAttention 3": attend}


def _measure(
    figures: dict[str, Any],
    name: str,
    ways: dict[str, Attend],
    plan: StepPlan,
) -> None:
    """Microseconds of one layer by each way.  plan: on the device."""
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    qkv = torch.empty(plan.num_tokens, width, dtype=torch.bfloat16, device=DEVICE).normal_()
    figures[name] = {}
    for way, attend in ways.items():
        try:
            took = seconds(_replay(attend, qkv, plan), 10, 2) / LAYERS
            figures[name][way] = round(took * 1e6, 1)
        except Exception as e:  # a size that does not fit into shared memory, a missing operator
            figures[name][way] = f"{type(e).__name__}: {e}"[:200]
    print(name, figures[name], flush=True)
    save(figures)


def _replay(attend: Attend, qkv: Tensor, plan: StepPlan) -> Callable[[], object]:
    """All layers, as one graph where there are graphs: no launch is waited for."""

    def layers() -> None:
        for layer in range(LAYERS):
            attend(qkv, plan, layer)

    if REHEARSES:
        return layers
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return graph.replay


if __name__ == "__main__":
    sys.exit(main())
