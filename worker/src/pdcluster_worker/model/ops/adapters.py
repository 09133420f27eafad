"""LoRA adapters of products: each adds x A^T B^T, scaled, to its own rows of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdcluster_worker.model.step_plan import StepPlan

PANEL = 16
"""Rows of A, or of B, that lie side by side in memory on a CPU."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's part in one projection.  first: the projection's column in the product."""

    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    scale: float
    first: int = 0

    @property
    def num_elements(self) -> int:
        """As the C kernels pack it: a rank is whole panels."""
        return -(-len(self.a) // PANEL) * PANEL * self.a.shape[1] + self.b.numel()


@dataclass(frozen=True, slots=True)
class Adapter:
    """parts: by projection, such as model.layers.0.self_attn.q_proj, in the file's dtype until they
    are packed.
    """

    name: str
    parts: Mapping[str, LowRank]
    fingerprint: str  # of all that its answers depend on

    @property
    def num_elements(self) -> int:
        return sum(part.num_elements for part in self.parts.values())


ProductParts = Sequence[LowRank | None]
"""An adapter's projections in one product; None = it leaves that as it is."""

Adapted = Any  # one adapter in a product, or all of them, in the implementation's own layout


class AdaptedProduct(NamedTuple):
    """columns: of the product's output."""

    parts: ProductParts
    columns: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_elements * part.a.itemsize for part in self.parts if part is not None)


class LayerAdapters(NamedTuple):
    """One adapter, or all of them, in a layer's products; None = nothing is added."""

    qkv: Adapted | None
    out: Adapted | None
    gate_up: Adapted | None
    down: Adapted | None


NOT_ADAPTED = LayerAdapters(None, None, None, None)

PackedAdapter = Sequence[LayerAdapters]
"""One adapter where the operations read it, layer by layer."""


def placed(parts: ProductParts, place: Callable[[Tensor], Tensor]) -> ProductParts:
    """Copies where the operations read them."""
    return [part and replace(part, a=place(part.a), b=place(part.b)) for part in parts]


def add_low_rank(
    x: Tensor, out: Tensor, plan: StepPlan, adapters: Sequence[ProductParts | None]
) -> None:
    """Sums are float32; x A^T and the result are rounded."""
    for index, rows in adapter_rows(plan):
        chosen = x[rows].float()
        for part in adapters[index] or ():
            if part is None:
                continue
            between = (chosen @ part.a.float().T * part.scale).to(x.dtype)
            added = between.float() @ part.b.float().T
            columns = out[:, part.first : part.first + len(part.b)]
            columns[rows] = (columns[rows].float() + added).to(out.dtype)


def adapter_rows(plan: StepPlan) -> Iterator[tuple[int, Tensor]]:
    """Each adapter of a step, and its rows."""
    runs = plan.adapter_runs.tolist()
    rows = torch.split(plan.adapter_rows, [count for _, count in runs]) if runs else ()
    yield from zip((index for index, _ in runs), rows, strict=True)
