"""Our decoder for llama-like models: embedding, layers and head, on whatever device they run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdcluster_worker.model.ops.adapters import NOT_ADAPTED, LayerAdapters, PackedAdapter
from pdcluster_worker.model.ops.experts import Experts
from pdcluster_worker.model.ops.operations import Layers, Norm, Operations, Packed, Rotation
from pdcluster_worker.model.step_plan import StepPlan


class Forward(ABC):
    """A model over its KV cache: our decoder, or transformers' module."""

    code: str  # "decoder" or "transformers"
    operations: Operations

    @abstractmethod
    def logits(self, plan: StepPlan) -> Tensor:
        """[R, vocab_size] float32, a row for each of `plan.sample_at`; also writes the KV cache."""

    def warm_up(self, num_rows: int) -> None:  # noqa: B027 - not every model needs it
        """Compile the products for that many rows."""

    def close(self) -> None:  # noqa: B027
        """End other processes that it started."""


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


class Decoder(Forward):
    """On a stage that is not the last, `logits` has no rows."""

    code = "decoder"

    def __init__(self, operations: Operations, weights: DecoderWeights) -> None:
        self.operations = operations
        self.adapters: Sequence[PackedAdapter | None] = ()
        self._weights = weights
        self._step = operations.prepare(self._compute)

    def logits(self, plan: StepPlan) -> Tensor:
        return self._step(plan)

    def adapt(self, adapters: Sequence[PackedAdapter | None]) -> None:
        """From the next step on these adapters, by the numbers that plans have; None = no longer
        there.
        """
        self.adapters = adapters
        layers = self._weights.layers
        present = any(adapters)
        each = [
            replace(layer, adapted=self._joined(index, adapters) if present else None)
            for index, layer in enumerate(layers.each)
        ]
        self._weights = replace(self._weights, layers=replace(layers, each=each))
        self.operations.forget_layers()

    def _joined(self, layer: int, adapters: Sequence[PackedAdapter | None]) -> LayerAdapters:
        places = [NOT_ADAPTED if each is None else each[layer] for each in adapters]
        return LayerAdapters(
            *(
                self.operations.join_adapters(products) if any(products) else None
                for products in zip(*places, strict=True)
            )
        )

    def _compute(self, plan: StepPlan) -> Tensor:
        ops, weights = self.operations, self._weights
        rotation = Rotation(weights.cosine[plan.positions], weights.sine[plan.positions])
        hidden = self._first_rows(plan.token_ids)
        ops.run_layers(hidden, plan, weights.layers, rotation)
        if not ops.group.is_last:
            ops.group.send(hidden)
            return hidden[:0]
        # Only the rows that are sampled go on; indexing copies them.
        last = ops.add_rms_norm(None, hidden[plan.sample_at], weights.norm)
        logits = ops.group.gather(ops.linear(last, weights.head))
        return (
            logits
            if logits.shape[1] == weights.vocab_size
            else logits[:, : weights.vocab_size].contiguous()
        )

    def _first_rows(self, token_ids: Tensor) -> Tensor:
        weights, group = self._weights, self.operations.group
        if not group.is_first:
            width = weights.embedding.shape[1]
            return group.receive(weights.embedding.new_empty(len(token_ids), width))
        rows = (
            self.operations.rows_of(weights.head, token_ids)
            if weights.is_tied
            else weights.embedding.index_select(0, token_ids)
        )
        return rows if weights.embedding_scale is None else rows * weights.embedding_scale

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
        ops.linear(qkv[:, : ops.shape.num_heads * ops.shape.head_dim].contiguous(), layer.out)
        if isinstance(layer.mlp, Experts):
            ops.mix_experts(hidden, layer.mlp, layers.activation)
        else:
            gate_up = ops.linear(hidden, layer.mlp.gate_up)
            ops.linear(ops.gate_mul(gate_up, layers.activation), layer.mlp.down)
