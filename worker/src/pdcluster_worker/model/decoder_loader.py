"""Makes the operations of a device, and our decoder of a checkpoint or a rank's part of it."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Decoder, DecoderWeights
from pdcluster_worker.model.loading.adapter import AdapterTarget
from pdcluster_worker.model.loading.checkpoint import EMBEDDING, NORM, Checkpoint, Linear
from pdcluster_worker.model.ops.adapters import (
    AdaptedProduct,
    Adapter,
    LayerAdapters,
    LowRank,
    PackedAdapter,
)
from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.experts import Experts
from pdcluster_worker.model.ops.kernel_arguments import KINDS
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels, requested_level
from pdcluster_worker.model.ops.operations import (
    ALONE,
    AttentionShape,
    Group,
    HeadNorms,
    Layer,
    Layers,
    Mlp,
    Norm,
    Operations,
    Packed,
)
from pdcluster_worker.model.ops.quantized_weight import columns_of, joined, padded, rows_of
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.rank_layout import ONE_RANK, ParallelRank
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.system.process import keep_freed_memory

logger = logging.getLogger(__name__)


def open_decoder(
    checkpoint: Checkpoint,
    cache: StoredKV,
    limits: StepLimits,
    *,
    invariant: bool,
    rank: ParallelRank = ONE_RANK,
    group: Group = ALONE,
) -> Decoder:
    """cache: the rank's part.  Raises ModelError if `invariant` is impossible."""
    if cache.device.type == "cuda" and checkpoint.architecture.mixture is not None:
        raise ModelError(
            "models with experts are computed on CPUs so far, not on cuda: set engine.device: cpu, "
            "or engine.type: vllm"
        )
    shape = rank.shape(checkpoint.architecture.attention)
    operations = make_operations(cache, shape, limits, invariant=invariant, group=group)
    decoder = Decoder(operations, pack_decoder(checkpoint, limits.longest, operations, rank))
    target = AdapterTarget.of(checkpoint)
    decoder.adapt([pack_adapter(each, target, operations, rank) for each in checkpoint.adapters])
    return decoder


def make_operations(
    cache: Tensor | StoredKV,
    shape: AttentionShape,
    limits: StepLimits,
    *,
    invariant: bool,
    group: Group = ALONE,
) -> Operations:
    """Raises ModelError if `invariant` is impossible, ConfigError for a bad PDCLUSTER_KERNELS."""
    cache = StoredKV.of(cache)
    if cache.device.type == "cuda":
        requested_level()
        # needs Triton, which images for CPUs lack
        from pdcluster_worker.model.ops.cuda import CudaOperations

        if invariant:
            raise ModelError("engine.batchInvariant is for CPUs so far, not for cuda: leave it out")
        return CudaOperations(cache, shape, limits, group)
    kernels = find_kernels()
    if isinstance(kernels, Kernels) and cache.dtype in KINDS:
        keep_freed_memory()
        operations = CpuOperations(cache, shape, kernels, group)
        if operations.note:
            logger.warning(operations.note)
        return operations
    reason = (
        f"there are none for {cache.dtype}: set model.dtype to bfloat16 or float32"
        if isinstance(kernels, Kernels)
        else kernels.reason
    )
    if invariant:
        raise ModelError(
            f"engine.batchInvariant needs the compiled kernels: {reason}, or leave "
            "engine.batchInvariant out"
        )
    note = f"computes with plain torch operations, which are slower: {reason}"
    logger.warning(note)
    return Reference(cache, shape, group, note)


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
        mlp=_experts(checkpoint, path, operations, rank)
        if architecture.is_mixed(index)
        else Mlp(outputs("mlp.gate_proj", "mlp.up_proj"), inputs("mlp.down_proj")),
        rotates=architecture.rotates[index],
        window=architecture.windows[index],
        sinks=_sinks(checkpoint, path, operations, rank) if architecture.family.has_sinks else None,
    )


def _experts(
    checkpoint: Checkpoint, path: str, operations: Operations, rank: ParallelRank
) -> Experts:
    """Those of the rank, each of them whole."""
    mixture = checkpoint.architecture.mixture
    assert mixture is not None, "the layer has experts"
    own = rank.share(mixture.count)
    gate_up, down = [], []
    for index in range(own.start, own.stop):  # one by one: some are copies until they are packed
        first, last = checkpoint.expert(path, index)
        gate_up.append(_pack(checkpoint, operations, *first))
        down.append(_pack(checkpoint, operations, last))
    return Experts(
        router=_pack(
            checkpoint, operations, checkpoint.linear(f"{path}.{mixture.names.router}"), wide=True
        ),
        gate_up=gate_up,
        down=down,
        chosen=mixture.chosen,
        normalizes=mixture.normalizes,
        first=own.start,
    )


def _sinks(checkpoint: Checkpoint, path: str, operations: Operations, rank: ParallelRank) -> Tensor:
    sinks = checkpoint.tensors[f"{path}.self_attn.sinks"]
    share = rank.share(len(sinks))
    return operations.place(sinks[share].to(checkpoint.dtype).float().clone())


def pack_adapter(
    adapter: Adapter, target: AdapterTarget, operations: Operations, rank: ParallelRank = ONE_RANK
) -> PackedAdapter:
    """The rank's part: its rows of B where outputs are divided, else its columns of A.

    Experts have none.
    """
    layers = rank.layers(target.architecture.num_layers)
    products = [_adapted_products(adapter, target, index, rank) for index in layers]
    packed = iter(operations.pack_adapter([one for each in products for one in each if one]))
    return [LayerAdapters(*(one and next(packed) for one in each)) for each in products]


def _adapted_products(
    adapter: Adapter, target: AdapterTarget, index: int, rank: ParallelRank
) -> Sequence[AdaptedProduct | None]:
    """Those of a layer, in the order of `LayerAdapters`."""
    path = f"model.layers.{index}"

    def converted(a: Tensor, b: Tensor, part: LowRank, first: int = 0) -> LowRank:
        return replace(part, a=a.to(target.dtype), b=b.to(target.dtype), first=first)

    def outputs(*names: str) -> AdaptedProduct:
        parts: list[LowRank | None] = []
        first = 0
        for name in names:
            share = rank.share(target.shapes[f"{path}.{name}.weight"][0])
            part = adapter.parts.get(f"{path}.{name}")
            parts.append(part and converted(part.a, part.b[share], part, first))
            first += share.stop - share.start
        return AdaptedProduct(parts, first)

    def inputs(name: str) -> AdaptedProduct:
        columns, depth = target.shapes[f"{path}.{name}.weight"]
        part, share = adapter.parts.get(f"{path}.{name}"), rank.share(depth)
        return AdaptedProduct([part and converted(part.a[:, share], part.b, part)], columns)

    is_mixed = target.architecture.is_mixed(index)
    return (
        outputs("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        inputs("self_attn.o_proj"),
        None if is_mixed else outputs("mlp.gate_proj", "mlp.up_proj"),
        None if is_mixed else inputs("mlp.down_proj"),
    )


def _pack(
    checkpoint: Checkpoint, operations: Operations, *products: Linear, wide: bool = False
) -> Packed:
    """Products of one input, converted here so that a model is never in memory in two dtypes."""
    weight = joined([product.weight for product in products], checkpoint.dtype)
    return operations.pack(weight, _bias(products, checkpoint.dtype), wide=wide)


def _bias(products: Sequence[Linear], dtype: torch.dtype) -> Tensor | None:
    if all(product.bias is None for product in products):
        return None
    rows = [
        torch.zeros(product.weight.shape[0]) if product.bias is None else product.bias
        for product in products
    ]
    return torch.cat([row.to(dtype) for row in rows])


def _norm(checkpoint: Checkpoint, name: str, operations: Operations) -> Norm:
    has_offset = checkpoint.architecture.family.offset_norms
    weight = checkpoint.tensors[name].to(checkpoint.dtype).float().clone()
    return Norm(
        operations.place(1.0 + weight if has_offset else weight),
        checkpoint.architecture.epsilon,
        rounds_first=not checkpoint.architecture.family.norms_round_once,
    )


def split_outputs(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's rows, and their biases."""
    share = rank.share(linear.weight.shape[0])
    bias = None if linear.bias is None else linear.bias[share]
    return Linear(rows_of(linear.weight, share), bias)


def split_inputs(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's columns.  The results are summed, so the first rank alone adds the bias."""
    share = rank.share(linear.weight.shape[1])
    return Linear(columns_of(linear.weight, share), None if rank.part else linear.bias)


def split_vocabulary(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's rows of the head; all have equally many, the last ones' missing rows are 0."""
    vocab_size = linear.weight.shape[0]
    size = -(-vocab_size // rank.tensor_size)
    weight, bias = linear.weight, linear.bias
    if missing := size * rank.tensor_size - vocab_size:
        weight = padded(weight, missing)
        bias = None if bias is None else functional.pad(bias, (0, missing))
    rows = slice(rank.part * size, (rank.part + 1) * size)
    return Linear(rows_of(weight, rows), None if bias is None else bias[rows])
