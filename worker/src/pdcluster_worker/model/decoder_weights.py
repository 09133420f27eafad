"""Packs the weights of a checkpoint for our decoder, or a rank's part of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdcluster_worker.model.decoder import DecoderWeights
from pdcluster_worker.model.loading.checkpoint import EMBEDDING, NORM, Checkpoint, Linear
from pdcluster_worker.model.ops.operations import (
    HeadNorms,
    Layer,
    Layers,
    Norm,
    Operations,
    Packed,
)
from pdcluster_worker.model.parallel.rank_layout import ONE_RANK, ParallelRank
from pdcluster_worker.model.parallel.sharding import split_inputs, split_outputs, split_vocabulary


def pack_decoder(
    checkpoint: Checkpoint,
    max_model_len: int,
    operations: Operations,
    rank: ParallelRank = ONE_RANK,
) -> DecoderWeights:
    """max_model_len: tokens for which there are positions."""
    architecture = checkpoint.architecture
    cosine, sine = architecture.rotary.table(max_model_len, checkpoint.dtype)
    scale = architecture.embedding_scale
    is_tied = rank is ONE_RANK and architecture.is_tied  # a rank has some rows of a head
    embedding = checkpoint.tensors[EMBEDDING]
    if is_tied or not rank.is_first:
        embedding = embedding[:1]
    return DecoderWeights(
        embedding=operations.place(embedding.to(checkpoint.dtype, copy=True)),
        embedding_scale=None
        if scale is None
        else operations.place(torch.tensor(scale).to(checkpoint.dtype)),
        cosine=operations.place(cosine),
        sine=operations.place(sine),
        layers=Layers(
            [
                _layer(checkpoint, index, operations, rank)
                for index in rank.layers(architecture.num_layers)
            ],
            architecture.activation,
        ),
        norm=_norm(checkpoint, NORM, operations),
        head=_pack(checkpoint, operations, split_vocabulary(checkpoint.head, rank), wide=True)
        if rank.is_last
        else None,
        vocab_size=architecture.vocab_size,
        is_tied=is_tied,
    )


def _layer(checkpoint: Checkpoint, index: int, operations: Operations, rank: ParallelRank) -> Layer:
    architecture, path = checkpoint.architecture, f"model.layers.{index}"

    def norm(name: str) -> Norm:
        return _norm(checkpoint, f"{path}.{name}.weight", operations)

    def outputs(*names: str) -> Packed:
        products = [split_outputs(checkpoint.linear(f"{path}.{name}"), rank) for name in names]
        return _pack(checkpoint, operations, *products)

    def inputs(name: str) -> Packed:
        return _pack(
            checkpoint, operations, split_inputs(checkpoint.linear(f"{path}.{name}"), rank)
        )

    has_head_norms = architecture.family.head_norms
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=outputs("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norms=HeadNorms(norm("self_attn.q_norm"), norm("self_attn.k_norm"))
        if has_head_norms
        else None,
        out=inputs("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=outputs("mlp.gate_proj", "mlp.up_proj"),
        down=inputs("mlp.down_proj"),
        rotates=architecture.rotates[index],
        window=architecture.windows[index],
    )


def _pack(
    checkpoint: Checkpoint, operations: Operations, *products: Linear, wide: bool = False
) -> Packed:
    """Products of one input, converted here so that a model is never in memory in two dtypes."""
    weights = [product.weight for product in products]
    together = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = _bias(products, checkpoint.dtype)
    return operations.pack(together.to(checkpoint.dtype), bias, wide=wide)


def _bias(products: Sequence[Linear], dtype: torch.dtype) -> Tensor | None:
    if all(product.bias is None for product in products):
        return None
    rows = [
        torch.zeros(len(product.weight)) if product.bias is None else product.bias
        for product in products
    ]
    return torch.cat([row.to(dtype) for row in rows])


def _norm(checkpoint: Checkpoint, name: str, operations: Operations) -> Norm:
    has_offset = checkpoint.architecture.family.offset_norms
    weight = checkpoint.tensors[name].to(checkpoint.dtype).float().clone()
    return Norm(
        operations.place(1.0 + weight if has_offset else weight),
        checkpoint.architecture.epsilon,
        rounds_first=not has_offset,
    )
