"""Operations on a CPU: C kernels on torch's threads.

A row's bits depend neither on the batch, nor on how a prompt was chunked, nor on threads.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.adapter_arguments import PackedAdapters, PackedProduct
from pdcluster_worker.model.ops.adapters import AdaptedProduct
from pdcluster_worker.model.ops.experts import Experts
from pdcluster_worker.model.ops.kernel_arguments import (
    ACTIVATIONS,
    KINDS,
    HugePages,
    PackedExperts,
    PackedStack,
    PackedWeights,
    PlanArguments,
    head_norm_arguments,
    kernel_operations,
    model_arguments,
    norm_fields,
    plan_arguments,
    products_of,
    quantized_columns,
    rotation_arguments,
)
from pdcluster_worker.model.ops.kernel_object import Kernels
from pdcluster_worker.model.ops.operations import (
    ALONE,
    Activation,
    AttentionShape,
    Group,
    HeadNorms,
    Layers,
    Norm,
    Operations,
    Rotation,
)
from pdcluster_worker.model.ops.quantized_weight import Weight
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.step_plan import StepPlan


class CpuOperations(Operations):
    """cache: in one piece from the layers on."""

    pads_rows = False

    def __init__(
        self,
        cache: Tensor | StoredKV,
        shape: AttentionShape,
        kernels: Kernels,
        group: Group = ALONE,
    ) -> None:
        super().__init__(cache, shape, group)
        if not self._cache.is_whole:
            raise ValueError("the KV cache is not contiguous within a head")
        self.name = f"cpu {kernels.level}"
        if kernels.skipped:
            self.note = f"computes by kernels of a lower level: {kernels.skipped}"
        self._library = library = kernels.library
        self._add_rms_norm, self._gate_mul = library.add_rms_norm, library.gate_mul
        self._rope_store, self._attend, self._product, self._run_layers = (
            library.rope_store,
            library.attend,
            library.product,
            library.layers,
        )
        self._adapt, self._experts = library.adapt, library.experts
        self.row_ops = kernel_operations(library)
        self._kind = KINDS[self._cache.dtype]
        self._model = model_arguments(self._cache, shape)
        self._model_at = ctypes.addressof(self._model)
        self._width = shape.num_heads * shape.head_dim
        self._pages = HugePages()
        self._plan: StepPlan | None = None
        self._plan_arguments = PlanArguments()
        self._layers: Layers | None = None
        self._stack: PackedStack | None = None
        self._packed_experts: dict[int, PackedExperts] = {}  # by the id of what each keeps

    def pack(
        self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False
    ) -> PackedWeights:
        """Copy the weights into panels of 32 columns; also where they are mapped from a file.

        Quantized ones whose groups are not whole steps of a row are packed as dense ones.
        """
        if isinstance(weight, Tensor):
            return self._pack(weight.contiguous(), bias, wide=wide)
        dtype = self._cache.dtype
        quantized = quantized_columns(weight, dtype)
        if quantized is None:
            return self._pack(weight.dense(dtype), bias, wide=wide)
        columns, depth = weight.shape
        num_bytes = self._library.packed_bytes(self._kind, columns, depth) // dtype.itemsize
        tiles, codes = self._pages.take(num_bytes), weight.codes.contiguous()
        self._library.pack_codes(self._kind, codes.data_ptr(), tiles.data_ptr(), columns, depth)
        return PackedWeights(tiles, weight.shape, dtype, bias, wide=wide, quantized=quantized)

    def _pack(self, weight: Tensor, bias: Tensor | None, *, wide: bool) -> PackedWeights:
        columns, depth = weight.shape
        kind = KINDS[weight.dtype]
        tiles = self._pages.take(self._library.packed_bytes(kind, columns, depth))
        self._library.pack(kind, weight.data_ptr(), tiles.data_ptr(), columns, depth)
        return PackedWeights(tiles, weight.shape, weight.dtype, bias, wide=wide)

    def rows_of(self, packed: PackedWeights, rows: Tensor) -> Tensor:
        assert packed.quantized is None, "an embedding is not quantized"
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < packed.columns:
            raise IndexError(f"a row of weights that have {packed.columns}")
        out = torch.empty((len(rows), packed.depth), dtype=self._cache.dtype)
        self._library.unpack(
            packed.address, rows.data_ptr(), out.data_ptr(), len(rows), packed.depth
        )
        return out

    def linear(self, x: Tensor, packed: PackedWeights) -> Tensor:
        if packed.missing:
            x = functional.pad(x, (0, packed.missing))
        rows = x.shape[0]
        out = torch.empty((rows, packed.columns), dtype=packed.dtype)
        self._product(packed.address, x.data_ptr(), out.data_ptr(), rows)
        return out

    def add_rms_norm(self, x: Tensor | None, hidden: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(hidden)
        added = None if x is None else x.data_ptr()
        self._add_rms_norm(
            self._kind, added, hidden.data_ptr(), out.data_ptr(), *hidden.shape, *norm_fields(norm)
        )
        return out

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, both = gate_up.shape
        out = torch.empty((rows, both // 2), dtype=gate_up.dtype)
        self._gate_mul(
            self._kind,
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            both // 2,
            ACTIVATIONS[activation],
        )
        return out

    def mix_experts(self, x: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """Expert by expert where rows need padding.  Raises MemoryError."""
        if any(packed.missing for packed in products_of(experts)):
            return super().mix_experts(x, experts, activation)
        out, packed = torch.empty_like(x), self._packed_experts.get(id(experts))
        if packed is None:
            packed = self._packed_experts[id(experts)] = PackedExperts(experts)
        if self._experts(
            self._kind,
            packed.address,
            x.data_ptr(),
            out.data_ptr(),
            *x.shape,
            ACTIVATIONS[activation],
        ):
            raise _out_of_memory()
        return out

    def rope_store(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        self._rope_store(
            self._model_at,
            self._address_of(plan),
            qkv.data_ptr(),
            layer,
            ctypes.byref(rotation_arguments(rotation)),
            None if norms is None else head_norm_arguments(norms),
        )

    def attend(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Raises MemoryError where there is no memory for the partial results."""
        out = torch.empty((qkv.shape[0], self._width), dtype=qkv.dtype)
        if self._attend(
            self._model_at,
            self._address_of(plan),
            qkv.data_ptr(),
            out.data_ptr(),
            layer,
            window or 0,
            None if sinks is None else sinks.data_ptr(),
        ):
            raise _out_of_memory()
        return out

    def pack_adapter(self, products: Sequence[AdaptedProduct]) -> Sequence[PackedProduct]:
        pages = HugePages(sum(product.num_bytes for product in products))
        return [PackedProduct(product, pages.take) for product in products]

    def join_adapters(self, packed: Sequence[PackedProduct | None]) -> PackedAdapters:
        return PackedAdapters(packed)

    def forget_layers(self) -> None:
        self._layers = self._stack = None

    def adapt(self, x: Tensor, out: Tensor, plan: StepPlan, adapted: PackedAdapters) -> None:
        between = _between(plan, adapted.between_elements, x.dtype)
        if between is not None:
            self._adapt(
                self._model_at,
                self._address_of(plan),
                adapted.address,
                x.data_ptr(),
                out.data_ptr(),
                between.data_ptr(),
            )

    def run_layers(
        self, hidden: Tensor, plan: StepPlan, layers: Layers, rotation: Rotation
    ) -> None:
        """One call, but layer by layer with ranks or padded products.  Raises MemoryError."""
        stack = self._stack_of(layers)
        if stack is None:
            super().run_layers(hidden, plan, layers, rotation)
            return
        memory = torch.empty((len(hidden), stack.row_elements), dtype=hidden.dtype)
        between = _between(plan, stack.between_elements, hidden.dtype)
        if self._run_layers(
            self._model_at,
            self._address_of(plan),
            stack.address,
            hidden.data_ptr(),
            memory.data_ptr(),
            None if between is None else between.data_ptr(),
            ctypes.byref(rotation_arguments(rotation)),
        ):
            raise _out_of_memory()

    def _address_of(self, plan: StepPlan) -> int:
        if plan is not self._plan:
            self._plan, self._plan_arguments = plan, plan_arguments(plan)
        return ctypes.addressof(self._plan_arguments)

    def _stack_of(self, layers: Layers) -> PackedStack | None:
        """Cached arguments of these layers; None where they run one by one."""
        if self._layers is not layers:
            self._layers = layers
            runs_whole = self.group is ALONE and PackedStack.takes(layers)
            self._stack = PackedStack(layers) if runs_whole else None
        return self._stack


def _between(plan: StepPlan, elements: int, dtype: torch.dtype) -> Tensor | None:
    """Workspace of the adapters of a step; None where they add nothing."""
    count = len(plan.adapter_rows) * elements
    return torch.empty(count, dtype=dtype) if count else None


def _out_of_memory() -> MemoryError:
    return MemoryError(
        "no memory for attention or experts of this step: lower max_batched_tokens or the context "
        "length"
    )
