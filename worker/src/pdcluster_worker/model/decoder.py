"""Our decoder for llama-like models: embedding, layers and head, on whatever device they run."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdcluster_worker.model.ops.operations import Layers, Norm, Operations, Packed, Rotation
from pdcluster_worker.model.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab_size, W]; only its first row if unused here or tied
    embedding_scale: Tensor | None
    cosine: Tensor  # [max_model_len, R] float32, rounded to the model's dtype
    sine: Tensor  # the same
    layers: Layers
    norm: Norm
    head: Packed | None  # logits are float32; None on other stages
    vocab_size: int
    is_tied: bool = False  # embedded rows are read from the packed head


class Stages(Protocol):
    """Neighbours of one pipeline stage."""

    is_first: bool
    is_last: bool

    def receive(self, like: Tensor) -> Tensor:
        """Hidden rows [T, W] of the previous stage, of the shape and dtype of `like`."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Send hidden rows [T, W] to the next stage."""
        ...


class _OneStage:
    is_first = is_last = True

    def receive(self, like: Tensor) -> Tensor:
        raise AssertionError("there is no other stage")

    def send(self, hidden: Tensor) -> None:
        raise AssertionError("there is no other stage")


ONE_STAGE: Stages = _OneStage()


class Decoder:
    """A `Forward`.  On a stage that is not the last, `logits` has no rows."""

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
        return self._step(plan)

    def _compute(self, plan: StepPlan) -> Tensor:
        ops, weights = self.operations, self._weights
        rotation = Rotation(weights.cosine[plan.positions], weights.sine[plan.positions])
        hidden = self._first_rows(plan.token_ids)
        ops.run_layers(hidden, plan, weights.layers, rotation)
        if not self._stages.is_last:
            self._stages.send(hidden)
            return hidden[:0]
        # Only the rows that are sampled go on; indexing copies them.
        last = ops.add_rms_norm(None, hidden[plan.sample_at], weights.norm)
        logits = ops.group.gather(ops.linear(last, weights.head))
        return (
            logits
            if logits.shape[1] == weights.vocab_size
            else logits[:, : weights.vocab_size].contiguous()
        )

    def close(self) -> None:
        pass

    def _first_rows(self, token_ids: Tensor) -> Tensor:
        if self._stages.is_first:
            return self._embed(token_ids)
        return self._stages.receive(
            self._weights.embedding.new_empty(len(token_ids), self._weights.embedding.shape[1])
        )

    def empty_logits(self, num_rows: int) -> Tensor:
        return self._weights.embedding.new_empty(
            num_rows, self._weights.vocab_size, dtype=torch.float32
        )

    def warm_up(self, num_rows: int) -> None:
        """One layer's products stand for all."""
        ops, layers = self.operations, self._weights.layers
        layer = layers.each[0]
        hidden = self._weights.embedding[:1].repeat(num_rows, 1)
        qkv = ops.linear(hidden, layer.qkv)
        ops.linear(qkv[:, : self._query_width].contiguous(), layer.out)
        gate_up = ops.linear(hidden, layer.gate_up)
        ops.linear(ops.gate_mul(gate_up, layers.activation), layer.down)

    def _embed(self, token_ids: Tensor) -> Tensor:
        weights = self._weights
        rows = (
            self.operations.rows_of(weights.head, token_ids)
            if weights.is_tied
            else torch.index_select(weights.embedding, 0, token_ids)
        )
        scale = weights.embedding_scale
        return rows if scale is None else rows * scale
