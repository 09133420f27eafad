"""Two small layers that differ in all that a layer may have, and steps for them."""

import math

import torch

from pdcluster_worker.model.ops.experts import Experts
from pdcluster_worker.model.ops.operations import Layer, Layers, Mlp, Norm, Operations
from tests.worker.model.ops.paged_steps import Case, Step

HEADS = Case("", (), num_heads=6, num_kv_heads=2, head_dim=32, block_size=16)
WIDTH, INNER = 96, 160
STEPS = {
    "one decode": [(5, 1)],
    "decodes": [(1, 1), (16, 1), (257, 1), (300, 1), (520, 1)],
    "decodes and chunks": [(12, 1), (300, 1), (40, 25), (2, 2), (290, 70)],
    "more rows than stay in a core's cache": [(30, 1), (300, 290)],
}


def make_layers(
    ops: Operations, step: Step, dtype: torch.dtype, depth: int = WIDTH, inner: int = INNER
) -> Layers:
    """Two layers that differ in all that a layer may have."""
    random = torch.Generator().manual_seed(5)

    def packed(columns: int, depth: int, *, biased: bool = False, wide: bool = False):
        weight = torch.randn(columns, depth, generator=random) / math.sqrt(depth)
        bias = torch.randn(columns, generator=random).to(dtype) if biased else None
        return ops.pack(weight.to(dtype), bias, wide=wide)

    def norm(*, rounds_first: bool) -> Norm:
        return Norm(torch.rand(depth, generator=random) + 0.5, 1e-5, rounds_first)

    def experts() -> Experts:
        return Experts(
            router=packed(6, depth, biased=True, wide=True),
            gate_up=[packed(2 * inner, depth, biased=True) for _ in range(6)],
            down=[packed(depth, inner, biased=True) for _ in range(6)],
            chosen=3,
            normalizes=False,
        )

    def layer(*, is_plain: bool) -> Layer:
        return Layer(
            attention_norm=norm(rounds_first=is_plain),
            qkv=packed(HEADS.width, depth, biased=not is_plain),
            head_norms=None if is_plain else step.norms,
            out=packed(depth, HEADS.num_heads * HEADS.head_dim),
            mlp_norm=norm(rounds_first=is_plain),
            mlp=Mlp(packed(2 * inner, depth), packed(depth, inner)) if is_plain else experts(),
            rotates=not is_plain,
            window=None if is_plain else 40,
            sinks=None if is_plain else torch.randn(HEADS.num_heads, generator=random),
        )

    return Layers([layer(is_plain=True), layer(is_plain=False)], "silu")


def rows_of(step: Step, dtype: torch.dtype, width: int = WIDTH) -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randn(len(step.plan.slots), width, generator=random).to(dtype)
