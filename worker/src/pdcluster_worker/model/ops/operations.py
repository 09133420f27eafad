"""The seam between the decoder and a device: a table of operations.

`reference` is plain torch and the oracle of the others; `cpu` has prepacked
products and kernels in C; `cuda` has Triton kernels.  The decoder, the plan of a
step and the runner know this table and nothing of a device.  Tests run the same
cases over every implementation.

Shapes: T rows of a step (padding included), S sequences of it, W the model's
width, Hq and Hkv query and KV heads, D the head size, qkv `[T, (Hq + 2 * Hkv) * D]`:
queries, then keys, then values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from pdcluster_worker.model.sampling.sampler import RowOperations
from pdcluster_worker.model.step_plan import StepPlan

Activation = Literal["silu", "gelu_tanh"]

Forward = Callable[[StepPlan], Tensor]
"""A step of a decoder over these operations: float32 logits `[R, vocab_size]` of the plan's
`sample_at`.
"""

Packed = Any
"""Weights of one product, in the form that the implementation wants."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of every layer.  scaling: factor of the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm.

    weight:       [width] float32; of a family that stores it as an offset, 1 is added already.
    epsilon:      added to the mean of squares.
    rounds_first: the normed value is rounded to the model's dtype before it is
                  multiplied (llama, qwen); otherwise the product alone is (gemma).
    """

    weight: Tensor
    epsilon: float
    rounds_first: bool = True


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of one step's rows: the first 2 * R numbers of a head are rotated in pairs
    (i, i + R).

    cosine, sine: [T, R] float32, rounded to the model's dtype.
    """

    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query and key head, before the rotation (qwen3).  Their weights are [D]."""

    query: Norm
    key: Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """Packed weights of one layer.

    rotates: its queries and keys carry their position.  window: tokens that a row sees; None = all.
    """

    attention_norm: Norm
    qkv: Packed
    head_norms: HeadNorms | None
    out: Packed
    mlp_norm: Norm
    gate_up: Packed
    down: Packed
    rotates: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a stage, one after another; the first stores in the cache's first layer."""

    each: Sequence[Layer]
    activation: Activation


class Group(Protocol):
    """The ranks that share each layer's products, as one of them sees it."""

    def reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks beside one another, in their order: [R, n] of each gives [R,
        ranks * n].
        """
        ...


class _Alone:
    """One rank."""

    def reduce(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


ALONE: Group = _Alone()


class Operations(Protocol):
    """One device, one dtype, one KV cache `[blocks, Hkv, layers, 2, block_size, D]`."""

    name: str
    """Name for the log and /version, such as "cpu avx512_bf16"."""

    note: str
    """Note for users on computing by them, with the fix; empty = nothing."""

    pads_rows: bool
    """True if steps are padded to a few numbers of rows, each warmed at start: where code is made
    for each number.
    """

    row_ops: RowOperations
    """Sampling, in the memory that the implementation decides on: logits are received there.  Every
    implementation gives the same bits.
    """

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor where these operations read it."""
        ...

    def prepare(self, forward: Forward) -> Forward:
        """Return the function that runs a step: `forward`, with its plan on devices that read one,
        or a faster form of it.

        Called once, when the model is loaded.  The logits of a call hold until the next one.
        """
        ...

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Packed:
        """Prepare weights [N, K] of one product; the caller may drop `weight` afterwards.

        wide: the product is summed and returned in float32 (logits).
        """
        ...

    def rows_of(self, packed: Packed, rows: Tensor) -> Tensor:
        """These rows [T] int64 of weights [N, K] as they were before they were packed: [T, K], of
        the model's dtype.

        So a head that is tied serves as the embedding too.  Raises IndexError for a row that the
        weights do not have, where the host knows the rows.
        """
        ...

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [T, K] times packed weights: [T, N], of x's dtype, or float32 where they are wide."""
        ...

    def add_rms_norm(self, x: Tensor | None, hidden: Tensor, norm: Norm) -> Tensor:
        """Add x to `hidden` in place, both [T, W], and return the normed `hidden` as a new tensor;
        x None adds nothing.
        """
        ...

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of gate_up [T, 2 * N], gate first: [T, N].

        The activation is rounded before it is multiplied.
        """
        ...

    def rope_store(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        """Norm and rotate queries and keys of qkv in place, then store keys and values at
        `plan.slots`; slot -1 stores nothing.

        rotation, norms: None leaves that out.
        """
        ...

    def attend(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        """Causal attention of every row over its sequence's stored context: [T, Hq * D]; rows of
        padding are 0.

        window: a row sees this many tokens, at least 1, its own the last; None = all before it.
        No slot beyond a row's own position or before its window is read into its result, whatever
        is there (NaN too); nor are the ids of blocks that lie before the windows of all its rows.
        """
        ...

    def run_layers(
        self, hidden: Tensor, plan: StepPlan, layers: Layers, rotation: Rotation
    ) -> None:
        """Add what the layers compute to `hidden` [T, W] in place: the operations above, one after
        another (`ops.layer_by_layer`), or a faster form of them that gives the same bits.
        """
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks of a tensor-parallel group; x itself where there is one rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Columns of all ranks of a tensor-parallel group, see `Group`; x itself where there is one
        rank.
        """
        ...
