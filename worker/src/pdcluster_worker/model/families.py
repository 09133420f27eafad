"""Reads our decoder's weights from a model's module, by the traits of its family."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdcluster_worker.model.decoder import DecoderWeights
from pdcluster_worker.model.loading.family import FAMILIES, Family
from pdcluster_worker.model.ops.operations import (
    Activation,
    HeadNorms,
    Layer,
    Layers,
    Norm,
    Operations,
    Packed,
)
from pdcluster_worker.model.parallel.rank_layout import ONE_RANK, ParallelRank
from pdcluster_worker.model.parallel.sharding import (
    SplitProduct,
    split_inputs,
    split_outputs,
    split_vocabulary,
)


class UnsupportedArchError(Exception):
    """Our decoder does not run this model; the message has the reason."""


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def read_weights(
    module: Any,
    max_model_len: int,
    operations: Operations,
    windows: Sequence[int | None],
    place: ParallelRank = ONE_RANK,
) -> DecoderWeights:
    """windows: of each layer, in tokens; None = full attention.

    Raises UnsupportedArchError for a type or structure that our decoder does not support.
    """
    family, activation = traits_of(module)
    model = module.model
    cosine, sine = rotary_table(model, max_model_len)
    scale = getattr(model.embed_tokens, "scalar_embed_scale", None)
    embedding = model.embed_tokens.weight.detach()
    # A rank has some columns of a head.
    is_tied = place is ONE_RANK and module.lm_head.weight is model.embed_tokens.weight
    return DecoderWeights(
        embedding=operations.place(
            (embedding if place.is_first and not is_tied else embedding[:1]).clone()
        ),
        embedding_scale=None
        if scale is None
        else operations.place(torch.tensor(scale).to(embedding.dtype)),
        cosine=operations.place(cosine),
        sine=operations.place(sine),
        layers=Layers(
            [
                _layer(model.layers[index], family, operations, place, windows[index])
                for index in place.layers(len(model.layers))
            ],
            activation,
        ),
        norm=_norm(operations, model.norm, family),
        head=_pack(operations, embedding.dtype, split_vocabulary(module.lm_head, place), wide=True)
        if place.is_last
        else None,
        vocab_size=len(module.lm_head.weight),
        is_tied=is_tied,
    )


def traits_of(module: Any) -> tuple[Family, Activation]:
    """Raises UnsupportedArchError for a type or structure that our decoder does not support."""
    config = module.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedArchError(
            f"model type {config.model_type} is not one of {', '.join(FAMILIES)}"
        )
    activation = ACTIVATIONS.get(str(getattr(config, "hidden_act", "")))
    if activation is None:
        raise UnsupportedArchError(
            f"hidden_act {getattr(config, 'hidden_act', None)} is not one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    for layer in module.model.layers:
        _check_parts(layer, family)
    return family, activation


def _check_parts(layer: Any, family: Family) -> None:
    """Refuse a layer with a part that our decoder would ignore."""
    parts = {name for name, _ in layer.named_children()}
    if parts != LAYER_PARTS:
        raise UnsupportedArchError(
            f"its layers have parts {', '.join(sorted(parts ^ LAYER_PARTS))} too many or too few"
        )
    products = {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        *(("q_norm", "k_norm") if family.head_norms else ()),
    }
    inside = {name for name, _ in layer.self_attn.named_children()}
    if inside != products:
        raise UnsupportedArchError(
            f"its attention has parts {', '.join(sorted(inside ^ products))} too many or too few"
        )
    if not all(
        isinstance(getattr(layer.self_attn, name), nn.Linear)
        for name in products
        if name.endswith("_proj")
    ):
        raise UnsupportedArchError("its products are not plain linear layers")


def _layer(
    layer: Any, family: Family, operations: Operations, place: ParallelRank, window: int | None
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    dtype = layer.input_layernorm.weight.dtype  # of the model
    head_norms = (
        HeadNorms(
            _norm(operations, attention.q_norm, family), _norm(operations, attention.k_norm, family)
        )
        if family.head_norms
        else None
    )
    return Layer(
        attention_norm=_norm(operations, layer.input_layernorm, family),
        qkv=_pack(
            operations,
            dtype,
            *(
                split_outputs(product, place)
                for product in (attention.q_proj, attention.k_proj, attention.v_proj)
            ),
        ),
        head_norms=head_norms,
        out=_pack(operations, dtype, split_inputs(attention.o_proj, place)),
        mlp_norm=_norm(operations, layer.post_attention_layernorm, family),
        gate_up=_pack(
            operations,
            dtype,
            split_outputs(mlp.gate_proj, place),
            split_outputs(mlp.up_proj, place),
        ),
        down=_pack(operations, dtype, split_inputs(mlp.down_proj, place)),
        rotates=bool(getattr(attention, "use_rope", True)) if family.may_not_rotate else True,
        window=window,
    )


def _pack(
    operations: Operations, dtype: torch.dtype, *products: SplitProduct, wide: bool = False
) -> Packed:
    """Products of one input, concatenated."""
    weights = [product.weight for product in products]
    together = torch.cat(weights) if len(weights) > 1 else weights[0]
    return operations.pack(together.to(dtype), _bias(products, dtype), wide=wide)


def _bias(products: Sequence[SplitProduct], dtype: torch.dtype) -> Tensor | None:
    if all(product.bias is None for product in products):
        return None
    rows = [
        torch.zeros(len(product.weight), dtype=dtype) if product.bias is None else product.bias
        for product in products
    ]
    return torch.cat(rows)


def _norm(operations: Operations, norm: Any, family: Family) -> Norm:
    epsilon = getattr(norm, "variance_epsilon", None)
    epsilon = norm.eps if epsilon is None else epsilon
    weight = norm.weight.detach().float().clone()
    weight = operations.place(1.0 + weight if family.offset_norms else weight)
    return Norm(weight, epsilon, rounds_first=not family.offset_norms)


def rotary_table(model: Any, max_model_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_model_len, R] of every position, by the module's own code."""
    like = model.embed_tokens.weight[:1].unsqueeze(0)
    positions = torch.arange(max_model_len, device=like.device).unsqueeze(0)
    cosine, sine = model.rotary_emb(like, positions)
    half = cosine.shape[-1] // 2
    return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()
