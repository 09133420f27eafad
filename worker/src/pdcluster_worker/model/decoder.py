"""Our decoder for llama-like models: nine operations a layer, on whatever device they run.

Its weights are read from transformers' module (`model.families`), and it is
compared with that module before it serves (`model.proof`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import Activation, HeadNorms, Norm, Operations, Packed, Rotation
from pdcluster_worker.model.step_plan import StepPlan


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
class DecoderWeights:
    """Everything a decoder computes with.

    embedding:       [vocab_size, W] of the model's dtype.
    embedding_scale: factor of its rows, of the model's dtype; None = 1.
    cosine, sine:    [max_model_len, R] float32, rounded to the model's dtype.
    head:            packed wide: logits are float32.
    """

    embedding: Tensor
    embedding_scale: Tensor | None
    cosine: Tensor
    sine: Tensor
    layers: Sequence[Layer]
    norm: Norm
    head: Packed
    activation: Activation


class Decoder:
    """See `model.forward.Forward`."""

    code = "decoder"

    def __init__(self, operations: Operations, weights: DecoderWeights, query_width: int) -> None:
        """query_width: query heads times head size."""
        self.operations = operations
        self._weights = weights
        self._query_width = query_width
        self._step = operations.prepare(self._compute)

    def logits(self, plan: StepPlan) -> Tensor:
        """See `Forward`."""
        return self._step(plan)

    def _compute(self, plan: StepPlan) -> Tensor:
        ops, weights = self.operations, self._weights
        rotation = Rotation(weights.cosine[plan.positions], weights.sine[plan.positions])
        hidden = self._embed(plan.token_ids)
        x: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            qkv = ops.linear(ops.add_rms_norm(x, hidden, layer.attention_norm), layer.qkv)
            ops.rope_store(qkv, plan, index, rotation if layer.rotates else None, layer.head_norms)
            x = ops.reduce(ops.linear(ops.attend(qkv, plan, index, layer.window), layer.out))
            gate_up = ops.linear(ops.add_rms_norm(x, hidden, layer.mlp_norm), layer.gate_up)
            x = ops.reduce(ops.linear(ops.gate_mul(gate_up, weights.activation), layer.down))
        assert x is not None, "a model has layers"
        # Only the rows that are sampled go on; indexing copies them.
        last = ops.add_rms_norm(x[plan.sample_at], hidden[plan.sample_at], weights.norm)
        return ops.linear(last, weights.head)

    def warm_up(self, num_rows: int) -> None:
        """See `Forward`: one layer's products stand for all."""
        ops, layer = self.operations, self._weights.layers[0]
        hidden = self._weights.embedding[:1].repeat(num_rows, 1)
        qkv = ops.linear(hidden, layer.qkv)
        ops.linear(qkv[:, : self._query_width].contiguous(), layer.out)
        gate_up = ops.linear(hidden, layer.gate_up)
        ops.linear(ops.gate_mul(gate_up, self._weights.activation), layer.down)

    def _embed(self, token_ids: Tensor) -> Tensor:
        rows = torch.index_select(self._weights.embedding, 0, token_ids)
        scale = self._weights.embedding_scale
        return rows if scale is None else rows * scale
