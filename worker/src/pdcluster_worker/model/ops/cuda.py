"""Operations on an NVIDIA GPU: Triton kernels, cuBLAS products, torch's attention."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.graphs import Graphs, PlanCopy
from pdcluster_worker.model.ops.operations import (
    ALONE,
    Activation,
    AttentionShape,
    Forward,
    Group,
    HeadNorms,
    Norm,
    Operations,
    Rotation,
)
from pdcluster_worker.model.ops.paged_attention import (
    make_attention,
    memory_of,
    power_of_two,
    strides,
)
from pdcluster_worker.model.ops.quantized_weight import Weight, dense_of
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.ops.triton_kernels import NO_FUSION, rows, sampling
from pdcluster_worker.model.sampling.picking import DEVICE_CHUNK, Picks, pick_tokens
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import RowOperations, rank_tokens
from pdcluster_worker.model.step_plan import StepLimits, StepPlan

BLOCK = 4096  # tokens that a program looks at together: 8 for each thread
WARPS = 16


def receive(logits: Tensor) -> Tensor:
    """Wait until the logits are computed."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return logits


def pick_on_device(logits: Tensor, rows: Rows) -> Picks:
    """`pick_tokens` for a small vocabulary: Triton 3.6 fails to compile rows of one block."""
    if logits.shape[1] <= BLOCK:
        return pick_tokens(logits, rows)
    assert logits.is_contiguous(), "the kernel finds a row by the size of the vocabulary"
    columns = (rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.u)
    settings = torch.from_numpy(np.stack(columns, axis=1, dtype=np.float64))
    is_cuda = logits.device.type == "cuda"
    if is_cuda:
        settings = settings.pin_memory()
    found = torch.empty(len(rows), 2, dtype=torch.int64, device=logits.device)
    workspaces = torch.empty(len(rows), BLOCK, dtype=torch.float32, device=logits.device)
    sampling.pick[(len(rows),)](
        logits,
        settings.to(logits.device, non_blocking=True),
        found,
        workspaces,
        vocab_size=logits.shape[1],
        block=BLOCK,
        num_warps=WARPS,
        **NO_FUSION,
    )
    # of a GPU: into pinned memory, which torch keeps for the next call
    picked = found.to("cpu", non_blocking=True)
    if is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    token_ids, status = np.ascontiguousarray(picked.numpy().T)
    return Picks(token_ids, status)


DEVICE_ROW_OPS = RowOperations(pick_on_device, partial(rank_tokens, chunk=DEVICE_CHUNK), receive)


GATE_BLOCK = 1024  # columns of one program of `gate_mul`


@dataclass(frozen=True, slots=True)
class DeviceProduct:
    """weight: [N, K], dequantized at each product; bias: [N]; wide: the result is float32."""

    weight: Weight
    bias: Tensor | None
    wide: bool


class CudaOperations(Operations):
    """cache: heads in one piece; plans: on the device."""

    row_ops = DEVICE_ROW_OPS

    def __init__(
        self,
        cache: Tensor | StoredKV,
        shape: AttentionShape,
        limits: StepLimits,
        group: Group = ALONE,
    ) -> None:
        super().__init__(cache, shape, group)
        self._limits = limits
        self._attention = make_attention(self._cache, shape, limits)
        self._copy = PlanCopy(self._cache.device, limits)
        self.name = f"cuda triton {triton.__version__}, attention by {self._attention.name}"

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._cache.device)

    def prepare(self, forward: Forward) -> Forward:
        """Capture graphs of decode steps; other steps run eagerly on a copy of their plan."""
        graphs = Graphs(self._copy, forward, self._attention.begin, longest=self._limits.longest)
        graphs.capture(max(self._limits.max_sequences, self._limits.max_decode_rows))
        return graphs.logits

    def pack(
        self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False
    ) -> DeviceProduct:
        device = self._cache.device
        return DeviceProduct(weight.to(device), None if bias is None else bias.to(device), wide)

    def rows_of(self, packed: DeviceProduct, rows: Tensor) -> Tensor:
        assert isinstance(packed.weight, Tensor), "an embedding is not quantized"
        return packed.weight.index_select(0, rows)

    def linear(self, x: Tensor, packed: DeviceProduct) -> Tensor:
        weight = dense_of(packed.weight, self._cache.dtype)
        if not packed.wide:
            return functional.linear(x, weight, packed.bias)
        wide = _wide_product(x, weight)
        return wide if packed.bias is None else wide + packed.bias

    def add_rms_norm(self, x: Tensor | None, hidden: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(hidden)
        num_rows, width = hidden.shape
        rows.add_rms_norm[(num_rows,)](
            hidden if x is None else x,
            hidden,
            norm.weight,
            out,
            epsilon=norm.epsilon,
            width=width,
            block=power_of_two(width),
            has_added=x is not None,
            rounds_first=norm.rounds_first,
            num_warps=4 if width <= 4096 else 8,
            **NO_FUSION,
        )
        return out

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        gated = gate_up.new_empty(num_rows, width)
        grid = (num_rows, -(-width // GATE_BLOCK))
        rows.gate_mul[grid](
            gate_up, gated, width, block=GATE_BLOCK, is_silu=activation == "silu", **NO_FUSION
        )
        return gated

    def rope_store(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        if norms is not None and norms.query.rounds_first != norms.key.rounds_first:
            raise ValueError("the norms of queries and of keys must round alike")
        shape = self.shape
        half = shape.head_dim // 2 if rotation is None else rotation.cosine.shape[-1]
        rows.rope_store[(len(qkv), shape.num_heads + 2 * shape.num_kv_heads)](
            qkv,
            memory_of(self._cache),
            plan.slots,
            # qkv stands for pointers that are not read.
            cosine=qkv if rotation is None else rotation.cosine,
            sine=qkv if rotation is None else rotation.sine,
            query_weight=qkv if norms is None else norms.query.weight,
            key_weight=qkv if norms is None else norms.key.weight,
            query_epsilon=0.0 if norms is None else norms.query.epsilon,
            key_epsilon=0.0 if norms is None else norms.key.epsilon,
            **strides(self._cache, layer),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            half=half,
            half_block=power_of_two(half),
            tail_block=power_of_two(max(1, shape.head_dim - 2 * half)),
            block_size=self._cache.block_size,
            rotates=rotation is not None,
            has_norms=norms is not None,
            rounds_first=norms is not None and norms.query.rounds_first,
            num_warps=1,
            **NO_FUSION,
        )

    def attend(
        self,
        qkv: Tensor,
        plan: StepPlan,
        layer: int,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None, "a model with sinks is refused when it is loaded"
        return self._attention.attend(qkv, plan, layer, window)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32; narrow weights are widened only where torch needs it."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return functional.linear(x.float(), weight.float())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
