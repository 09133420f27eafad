"""The operations in plain torch: the oracle of the others, and the fallback without kernels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.operations import (
    ALONE,
    Activation,
    AttentionShape,
    Group,
    HeadNorms,
    Norm,
    Operations,
    Rotation,
)
from pdcluster_worker.model.ops.quantized_weight import Weight
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.sampling.sampler import PLAIN_TENSORS
from pdcluster_worker.model.step_plan import StepPlan


class Weights(NamedTuple):
    weight: Weight  # [N, K]
    bias: Tensor | None  # [N]
    wide: bool


class Reference(Operations):
    """note: why this fallback is used."""

    name = "reference"
    row_ops = PLAIN_TENSORS

    def __init__(
        self,
        cache: Tensor | StoredKV,
        shape: AttentionShape,
        group: Group = ALONE,
        note: str = "",
    ) -> None:
        super().__init__(cache, shape, group)
        self.note = note

    def pack(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Weights:
        if wide and isinstance(weight, Tensor):
            weight = weight.float()
        return Weights(weight, bias.float() if wide and bias is not None else bias, wide)

    def rows_of(self, packed: Weights, rows: Tensor) -> Tensor:
        assert isinstance(packed.weight, Tensor), "an embedding is not quantized"
        return packed.weight.index_select(0, rows).to(self._cache.dtype)

    def linear(self, x: Tensor, packed: Weights) -> Tensor:
        weight = packed.weight
        if not isinstance(weight, Tensor):
            dense = weight.dense(self._cache.dtype)
            weight = dense.float() if packed.wide else dense
        return functional.linear(x.to(weight.dtype), weight, packed.bias)

    def add_rms_norm(self, x: Tensor | None, hidden: Tensor, norm: Norm) -> Tensor:
        if x is not None:
            hidden += x
        return rms_norm(hidden, norm)

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_silu":
            wide = gate.float().clamp(max=7)
            return (wide * torch.sigmoid(1.702 * wide)).to(up.dtype) * (up.clamp(-7, 7) + 1)
        return (
            functional.silu(gate)
            if activation == "silu"
            else functional.gelu(gate, approximate="tanh")
        ) * up

    def rope_store(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        query, both = heads[:, :num_heads], heads[:, num_heads:]
        key, value = both[:, :num_kv_heads], both[:, num_kv_heads:]
        if norms is not None:
            query.copy_(rms_norm(query, norms.query))
            key.copy_(rms_norm(key, norms.key))
        if rotation is not None:
            _rotate(heads[:, : num_heads + num_kv_heads], rotation)
        slots = plan.slots[: plan.num_tokens].to(qkv.device)
        size = self._cache.block_size
        for half, rows in enumerate((key, value)):
            self._cache.write(slots // size, slots % size, layer, half, rows[: plan.num_tokens])

    def attend(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        shape = self.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        out = qkv.new_zeros(len(qkv), shape.num_heads, shape.head_dim)
        sequences = torch.stack(
            (plan.firsts, plan.lengths, plan.contexts, plan.table_rows), dim=1
        ).tolist()
        for first, length, context, table_row in sequences:
            query = heads[first : first + length, : shape.num_heads]
            start = max(0, context - length + 1 - window) if window else 0
            key, value = self._stored(plan.tables[table_row], start, context, layer)
            if sinks is not None:
                rows = self._attend_with_sinks(query, key, value, _mask(length, key, window), sinks)
            else:
                rows = self._attend_one(query, key, value, window)
            out[first : first + length] = rows
        return out.flatten(1)

    def _stored(self, table: Tensor, start: int, context: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values from position `start` on, each [Hkv, context - start, D]."""
        size = self._cache.block_size
        before = start // size
        blocks = table[before : -(-context // size)].to(self._cache.device)
        stored = self._cache.read(blocks, layer)
        key, value = stored.permute(2, 1, 0, 3, 4).flatten(2, 3)[
            :, :, start - before * size : context - before * size
        ]
        return key, value

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """The last rows of one sequence.  query, result: [L, Hq, D]."""
        out = functional.scaled_dot_product_attention(
            query.to(key.dtype).transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=_mask(len(query), key, window) if len(query) > 1 else None,
            scale=self.shape.scaling,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )
        return out[0].transpose(0, 1)

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
    ) -> Tensor:
        """The last rows of one sequence, summed in float32.  mask: [L, C]; result: [L, Hq, D]."""
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (part.float().repeat_interleave(repeats, 0) for part in (key, value))
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self.shape.scaling
        scores = scores.masked_fill(~mask, float("-inf"))
        last = sinks.view(-1, 1, 1).expand(-1, len(query), 1)
        weights = torch.cat((scores, last), dim=2).softmax(2)[:, :, :-1]
        return (weights @ values).transpose(0, 1).to(query.dtype)


def _mask(length: int, key: Tensor, window: int | None) -> Tensor:
    """[length, context]: the keys that each row sees."""
    context = key.shape[1]
    mask = torch.ones(length, context, dtype=torch.bool, device=key.device).tril(context - length)
    return mask.triu(context - length + 1 - window) if window else mask


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Over the last dimension, in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounds_first:
        return norm.weight.to(x.dtype) * normed.to(x.dtype)
    return (normed * norm.weight).to(x.dtype)


def _rotate(heads: Tensor, rotation: Rotation) -> None:
    """Rotate [T, H, D] in place; each product is rounded, then their sum."""
    cosine, sine = (part.to(heads.dtype).unsqueeze(1) for part in (rotation.cosine, rotation.sine))
    half = cosine.shape[-1]
    left, right = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half] = left * cosine + -right * sine
    heads[..., half : 2 * half] = right * cosine + left * sine
