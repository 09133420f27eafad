"""Interface between the decoder and a device; `reference` is the oracle of `cpu` and `cuda`.

Shapes: T rows of a step with padding, S sequences, W the model's width, Hq and Hkv query and KV
heads, D the head size, qkv `[T, (Hq + 2 * Hkv) * D]`: queries, keys, values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pdcluster_worker.model.ops.adapters import (
    NOT_ADAPTED,
    Adapted,
    AdaptedProduct,
    LayerAdapters,
    add_low_rank,
    placed,
)
from pdcluster_worker.model.ops.experts import Experts, choose
from pdcluster_worker.model.ops.quantized_weight import Weight
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.sampling.sampler import RowOperations
from pdcluster_worker.model.step_plan import StepPlan

# clamped_silu: gpt-oss's, of a gate up to 7 with a slope of 1.702, times a clamped factor plus 1
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]

# computes float32 logits `[R, vocab_size]` of the plan's `sample_at`
Forward = Callable[[StepPlan], Tensor]

Packed = Any  # weights of one product, in the implementation's own layout


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # factor of the scores


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # [width] float32; offset weights (gemma) have 1 added already
    epsilon: float
    rounds_first: bool = True  # round before the product (llama, qwen), else after (gemma)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The first 2 * R elements of a head rotate in pairs (i, i + R)."""

    cosine: Tensor  # [T, R] float32, rounded to the model's dtype
    sine: Tensor  # the same


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query and key head, before the rotation (qwen3).  Weights: [D]."""

    query: Norm
    key: Norm


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Packed
    head_norms: HeadNorms | None
    out: Packed
    mlp_norm: Norm
    mlp: Mlp | Experts
    rotates: bool = True  # has positions
    window: int | None = None  # tokens; None = full attention
    sinks: Tensor | None = None  # [Hq] float32: a score of each head that has no value
    adapted: LayerAdapters | None = None  # None = the model has no adapters


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of a stage; the first uses layer 0 of the cache."""

    each: Sequence[Layer]
    activation: Activation


class Group:
    """The ranks of an engine, as one of them sees it: here it is alone."""

    is_first = True  # of the pipeline's stages
    is_last = True

    def reduce(self, x: Tensor) -> Tensor:
        """All-reduce (sum) over the stage; x may be overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All-gather of the stage's columns in rank order: [R, n] of each gives [R, ranks * n]."""
        return x

    def receive(self, like: Tensor) -> Tensor:
        """Hidden rows [T, W] of the previous stage, of the shape and dtype of `like`."""
        raise AssertionError("there is no other stage")

    def send(self, hidden: Tensor) -> None:
        """Send hidden rows [T, W] to the next stage."""
        raise AssertionError("there is no other stage")


ALONE = Group()


class Operations(ABC):
    """One device, one dtype, one KV cache: a `StoredKV`, or its rows where all is as computed."""

    name: str  # for the log and /version, such as "cpu avx512_bf16"
    note = ""  # warning for users, with the fix; empty = none
    pads_rows = True  # steps are padded to a few sizes, because code is compiled for each
    row_ops: RowOperations  # sampling; every implementation gives the same bits

    def __init__(self, cache: Tensor | StoredKV, shape: AttentionShape, group: Group) -> None:
        self.group = group
        self.shape = shape
        self._cache = StoredKV.of(cache)

    def place(self, tensor: Tensor) -> Tensor:
        """Copy to where these operations read it."""
        return tensor

    def prepare(self, forward: Forward) -> Forward:
        """Return the function that runs a step; its logits are valid until the next call."""
        return forward

    @abstractmethod
    def pack(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Packed:
        """Prepare weights [N, K]; `weight` may be dropped.  wide: results are float32 (logits).

        Quantized ones stay in 8 bits, and give the results of `dense` in the cache's dtype.
        """

    @abstractmethod
    def rows_of(self, packed: Packed, rows: Tensor) -> Tensor:
        """Unpacked rows [T, K] for a tied embedding, which is not quantized; rows: [T] int64.

        May raise IndexError.
        """

    @abstractmethod
    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [T, K] to [T, N], of x's dtype, or float32 for wide weights."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor | None, hidden: Tensor, norm: Norm) -> Tensor:
        """Add x to `hidden` in place, both [T, W]; returns the normed `hidden` as a new tensor."""

    @abstractmethod
    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of gate_up [T, 2 * N], gate first; rounds the activation."""

    def mix_experts(self, x: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """[T, W]: what this rank's experts make of their rows, weighted; sums are float32."""
        logits = self.linear(x, experts.router)
        numbers, weights = choose(logits.to(x.dtype), experts)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        for index, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            rows, places = (numbers == experts.first + index).nonzero(as_tuple=True)
            if len(rows):
                gated = self.gate_mul(self.linear(x[rows], gate_up), activation)
                total[rows] += weights[rows, places, None] * self.linear(gated, down).float()
        return total.to(x.dtype)

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        """Norm and rotate queries and keys in place, then store keys and values at `plan.slots`.

        Slot -1 stores nothing.
        """

    @abstractmethod
    def attend(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of every row over its stored context: [T, Hq * D]; padding rows are 0.

        window: tokens that a row sees, its own included; None = all before it.
        sinks:  see `Layer`.
        Slots after a row's position or before its window do not affect it, even NaN; blocks before
        the windows of all rows are not read.
        """

    def pack_adapter(self, products: Sequence[AdaptedProduct]) -> Sequence[Adapted]:
        """Copy one adapter into memory that is freed with it."""
        return [placed(product.parts, self.place) for product in products]

    def join_adapters(self, packed: Sequence[Adapted | None]) -> Adapted:
        """All adapters of a product, each at its place; None = none has it, but one at least."""
        return packed

    def forget_layers(self) -> None:  # noqa: B027 - only some keep more than the layers do
        """Free what is kept of the layers of the last step: they have changed."""

    def adapt(self, x: Tensor, out: Tensor, plan: StepPlan, adapted: Adapted) -> None:
        """Add to `out`, a product of `x`, what adapters make of their rows, in place.

        Other rows are neither read nor written.
        """
        add_low_rank(x, out, plan, adapted)

    def _adapted_linear(
        self, x: Tensor, packed: Packed, plan: StepPlan, adapted: Adapted | None
    ) -> Tensor:
        out = self.linear(x, packed)
        if adapted is not None and len(plan.adapter_runs):
            self.adapt(x, out, plan, adapted)
        return out

    def run_layers(
        self, hidden: Tensor, plan: StepPlan, layers: Layers, rotation: Rotation
    ) -> None:
        """Add the layers' result to `hidden` [T, W] in place: here by one operation after another.

        Any other way gives the same bits.
        """
        x: Tensor | None = None
        for index, layer in enumerate(layers.each):
            adapted = layer.adapted or NOT_ADAPTED
            normed = self.add_rms_norm(x, hidden, layer.attention_norm)
            qkv = self._adapted_linear(normed, layer.qkv, plan, adapted.qkv)
            turn = rotation if layer.rotates else None
            self.rope_store(qkv, plan, index, turn, layer.head_norms)
            attended = self.attend(qkv, plan, index, layer.window, layer.sinks)
            x = self.group.reduce(self._adapted_linear(attended, layer.out, plan, adapted.out))
            normed = self.add_rms_norm(x, hidden, layer.mlp_norm)
            x = self.group.reduce(self._after_attention(normed, plan, layer, layers.activation))
        assert x is not None, "a stage has layers"
        hidden.add_(x)

    def _after_attention(
        self, normed: Tensor, plan: StepPlan, layer: Layer, activation: Activation
    ) -> Tensor:
        mlp, adapted = layer.mlp, layer.adapted or NOT_ADAPTED
        if isinstance(mlp, Experts):
            return self.mix_experts(normed, mlp, activation)
        gate_up = self._adapted_linear(normed, mlp.gate_up, plan, adapted.gate_up)
        gated = self.gate_mul(gate_up, activation)
        return self._adapted_linear(gated, mlp.down, plan, adapted.down)
