"""The layers of a model over the `cuda` operations, with random weights, and plans for them."""

from dataclasses import dataclass, replace

import torch
from setting import DEVICE, REHEARSES
from torch import Tensor

from pdcluster_worker.model.ops.cuda import CudaOperations, DeviceProduct
from pdcluster_worker.model.ops.graphs import Graphs, PlanCopy
from pdcluster_worker.model.ops.operations import AttentionShape, Norm, Rotation
from pdcluster_worker.model.step_plan import StepLimits, StepPlan

BLOCK_SIZE = 16
PROMPTS = (32, 48) if REHEARSES else (2048, 8192)
DECODES = (
    ((1, 40), (2, 30))
    if REHEARSES
    else ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (16, 8192))
)
"""Sequences and their context."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model.  width, inner: of its rows and its feed-forward."""

    name: str
    layers: int
    width: int
    inner: int
    vocab: int
    shape: AttentionShape

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values."""
        return (self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim

    @property
    def layer_weights(self) -> int:
        """Numbers of the products of all layers."""
        heads = self.shape.num_heads * self.shape.head_dim
        return self.layers * self.width * (self.qkv_width + heads + 3 * self.inner)

    @property
    def weights(self) -> int:
        """Numbers of all products, the head's included."""
        return self.layer_weights + self.width * self.vocab

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token."""
        return self.layers * 2 * self.shape.num_kv_heads * self.shape.head_dim


SMALL = Model("135M (SmolLM2)", 30, 576, 1536, 49152, AttentionShape(9, 3, 64, 0.125))
LARGE = Model("8B (Llama 3)", 32, 4096, 14336, 128256, AttentionShape(32, 8, 128, 128**-0.5))
if REHEARSES:
    LARGE = replace(
        LARGE, layers=1, width=64, inner=96, vocab=128, shape=AttentionShape(4, 2, 16, 0.25)
    )
    SMALL = LARGE


class Stack:
    """The layers in bfloat16, with no embedding of tokens; `linear` times the products alone."""

    def __init__(self, model: Model, operations: CudaOperations) -> None:
        self._model, self._operations = model, operations
        heads = model.shape.num_heads * model.shape.head_dim
        sizes = (
            (model.qkv_width, model.width),
            (model.width, heads),
            (2 * model.inner, model.width),
            (model.width, model.inner),
        )
        self._layers = [[self._pack(*size) for size in sizes] for _ in range(model.layers)]
        self._head = self._pack(model.vocab, model.width, wide=True)
        self._norm = Norm(torch.ones(model.width, device=DEVICE), 1e-5)
        self._embedded = torch.randn(4096, model.width, dtype=torch.bfloat16, device=DEVICE)
        self._angles = torch.rand(4096, model.shape.head_dim // 2, device=DEVICE)

    def _pack(self, rows: int, columns: int, *, wide: bool = False) -> DeviceProduct:
        weight = torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) * columns**-0.5
        return self._operations.pack(weight, wide=wide)

    def __call__(self, plan: StepPlan) -> Tensor:
        """Logits of a placed plan."""
        run, rows = self._operations, plan.token_ids % 4096
        hidden, angles = self._embedded[rows], self._angles[plan.positions % 4096]
        rotation = Rotation(angles.cos(), angles.sin())
        x = run.add_rms_norm(None, hidden, self._norm)
        for layer, (qkv_weight, out_weight, up_weight, down_weight) in enumerate(self._layers):
            qkv = run.linear(x, qkv_weight)
            run.rope_store(qkv, plan, layer, rotation, None)
            out = run.linear(run.attend(qkv, plan, layer), out_weight)
            x = run.add_rms_norm(out, hidden, self._norm)
            x = run.linear(run.gate_mul(run.linear(x, up_weight), "silu"), down_weight)
            x = run.add_rms_norm(x, hidden, self._norm)
        return run.linear(x[plan.sample_at], self._head)

    def products(self, plan: StepPlan) -> None:
        """The products of a step alone."""
        run, hidden = self._operations, self._embedded[plan.token_ids % 4096]
        heads = self._model.shape.num_heads * self._model.shape.head_dim
        for qkv_weight, out_weight, up_weight, down_weight in self._layers:
            run.linear(run.linear(hidden, qkv_weight)[:, :heads], out_weight)
            run.linear(run.linear(hidden, up_weight)[:, : self._model.inner], down_weight)
        run.linear(hidden[plan.sample_at], self._head)

    def attention(self, plan: StepPlan) -> None:
        """The attention of a step alone."""
        qkv = torch.empty(
            len(plan.token_ids), self._model.qkv_width, dtype=torch.bfloat16, device=DEVICE
        ).normal_()
        for layer in range(self._model.layers):
            self._operations.attend(qkv, plan, layer)


@dataclass
class Opened:
    """A stack over a cache with room for the largest plan, and its captured graphs (None: no
    graphs on a CPU)."""

    stack: Stack
    copy: PlanCopy
    graphs: Graphs | None
    operations: CudaOperations
    cache: Tensor
    limits: StepLimits


def open_stack(model: Model, *, longest: int = max(max(PROMPTS), 8192)) -> Opened:
    """longest: engine.maxModelLen, as it were."""
    tokens = max(max(batch * context for batch, context in DECODES), *PROMPTS)
    shape = model.shape
    size = (
        tokens // BLOCK_SIZE + 8,
        shape.num_kv_heads,
        model.layers,
        2,
        BLOCK_SIZE,
        shape.head_dim,
    )
    cache = torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_()
    batch = max(batch for batch, _ in DECODES)
    limits = StepLimits(max(PROMPTS), batch, longest, BLOCK_SIZE)
    copy, operations = PlanCopy(cache.device, limits), CudaOperations(cache, shape, limits)
    stack = Stack(model, operations)
    graphs = None
    if not REHEARSES:
        graphs = Graphs(copy, stack, operations._attention.begin, longest=longest)
        graphs.capture(batch)
    return Opened(stack, copy, graphs, operations, cache, limits)


def plan_of(contexts: list[int], rows: int) -> StepPlan:
    """Sequences of `rows` rows each, with blocks one after another."""
    count, width = len(contexts), -(-max(contexts) // BLOCK_SIZE)
    tables = torch.arange(count * width, dtype=torch.int32).view(count, width)
    positions = torch.cat([torch.arange(context - rows, context) for context in contexts])
    table_rows = torch.arange(count, dtype=torch.int32)
    blocks = tables[table_rows.long().repeat_interleave(rows), positions // BLOCK_SIZE].long()
    return StepPlan(
        num_tokens=count * rows,
        num_decodes=count if rows == 1 else 0,
        longest=max(contexts),
        token_ids=torch.randint(4096, (count * rows,)),
        positions=positions,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        firsts=table_rows * rows,
        lengths=torch.full((count,), rows, dtype=torch.int32),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        table_rows=table_rows,
        tables=tables,
        sample_at=torch.arange(1, count + 1) * rows - 1,
    )


def prefill_operations(model: Model, prompt: int) -> int:
    """Operations of a prefill, causal attention counted by half."""
    heads = model.shape.num_heads * model.shape.head_dim
    return 2 * prompt * model.layer_weights + prompt**2 * model.layers * 2 * heads


def decode_bytes(model: Model, batch: int, context: int) -> int:
    """Bytes that a decode step must read."""
    return 2 * (model.weights + batch * context * model.kv_numbers)
