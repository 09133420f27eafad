"""Our decoder for llama-like models: nine operations a layer, on whatever device they run.

Its weights are read from transformers' module (`model.families`), and it is
compared with that module before it serves (`model.proof`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import (
    Activation,
    HeadNorms,
    Norm,
    Operations,
    Packed,
    Rotation,
)
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

    embedding:       [vocab_size, W] of the model's dtype; its first row alone where another stage
                     embeds.
    embedding_scale: factor of its rows, of the model's dtype; None = 1.
    cosine, sine:    [max_model_len, R] float32, rounded to the model's dtype.
    layers:          of this stage.
    head:            packed wide: logits are float32; of several ranks, one after another, the first
                     `vocab_size` columns count.  None where another stage has it.
    """

    embedding: Tensor
    embedding_scale: Tensor | None
    cosine: Tensor
    sine: Tensor
    layers: Sequence[Layer]
    norm: Norm
    head: Packed | None
    vocab_size: int
    activation: Activation


class Stages(Protocol):
    """The neighbours of one pipeline stage.  is_first: it embeds tokens; is_last: it
    makes logits.
    """

    is_first: bool
    is_last: bool

    def receive(self, like: Tensor) -> Tensor:
        """Hidden rows [T, W] of the stage before this one, of the shape and dtype of `like`."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Hand hidden rows [T, W] on to the next stage."""
        ...


class _OneStage:
    is_first = is_last = True

    def receive(self, like: Tensor) -> Tensor:
        raise AssertionError("there is no other stage")

    def send(self, hidden: Tensor) -> None:
        raise AssertionError("there is no other stage")


ONE_STAGE: Stages = _OneStage()


class Decoder:
    """See `model.forward.Forward`.  Of a stage that is not the last one, `logits` has no rows."""

    code = "decoder"

    def __init__(
        self,
        operations: Operations,
        weights: DecoderWeights,
        query_width: int,
        stages: Stages = ONE_STAGE,
    ) -> None:
        """query_width: query heads of this rank times head size."""
        self.operations = operations
        self._weights = weights
        self._query_width = query_width
        self._stages = stages
        self._step = operations.prepare(self._compute)

    def logits(self, plan: StepPlan) -> Tensor:
        """See `Forward`."""
        return self._step(plan)

    def _compute(self, plan: StepPlan) -> Tensor:
        ops, weights = self.operations, self._weights
        rotation = Rotation(weights.cosine[plan.positions], weights.sine[plan.positions])
        hidden = self._first_rows(plan.token_ids)
        x: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            qkv = ops.linear(ops.add_rms_norm(x, hidden, layer.attention_norm), layer.qkv)
            ops.rope_store(qkv, plan, index, rotation if layer.rotates else None, layer.head_norms)
            x = ops.reduce(ops.linear(ops.attend(qkv, plan, index, layer.window), layer.out))
            gate_up = ops.linear(ops.add_rms_norm(x, hidden, layer.mlp_norm), layer.gate_up)
            x = ops.reduce(ops.linear(ops.gate_mul(gate_up, weights.activation), layer.down))
        assert x is not None, "a stage has layers"
        if not self._stages.is_last:
            self._stages.send(hidden.add_(x))
            return hidden[:0]
        # Only the rows that are sampled go on; indexing copies them.
        last = ops.add_rms_norm(x[plan.sample_at], hidden[plan.sample_at], weights.norm)
        logits = ops.gather(ops.linear(last, weights.head))
        return (
            logits
            if logits.shape[1] == weights.vocab_size
            else logits[:, : weights.vocab_size].contiguous()
        )

    def close(self) -> None:
        """See `Forward`: it started nothing."""

    def _first_rows(self, token_ids: Tensor) -> Tensor:
        if self._stages.is_first:
            return self._embed(token_ids)
        return self._stages.receive(
            self._weights.embedding.new_empty(len(token_ids), self._weights.embedding.shape[1])
        )

    def empty_logits(self, num_rows: int) -> Tensor:
        """Room for logits [num_rows, vocab_size] where this rank computes."""
        return self._weights.embedding.new_empty(
            num_rows, self._weights.vocab_size, dtype=torch.float32
        )

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
