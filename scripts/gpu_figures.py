"""Times of steps on this GPU beside its roofline: layers of the `cuda` operations over random
weights.

A decode step must read the weights and the keys and values once; a prefill must
multiply.  Both are compared with what this device reaches at a plain copy and a
plain product, measured in the same run.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdcluster_worker.model.ops.cuda import CudaOperations, Product
from pdcluster_worker.model.ops.graphs import Graphs
from pdcluster_worker.model.ops.operations import AttentionShape, Norm, Rotation
from pdcluster_worker.model.ops.plan_copy import PlanCopy
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

BLOCK_SIZE = 16
CONTEXT = 1024
PROMPT = 2048
BATCHES = (1, 16, 64)


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
    def weights(self) -> int:
        """Numbers of all products, the head's included."""
        heads = self.shape.num_heads * self.shape.head_dim
        layer = self.width * (self.qkv_width + heads + 3 * self.inner)
        return self.layers * layer + self.width * self.vocab

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token."""
        return self.layers * 2 * self.shape.num_kv_heads * self.shape.head_dim


MODELS = (
    Model("135M (SmolLM2)", 30, 576, 1536, 49152, AttentionShape(9, 3, 64, 0.125)),
    Model("8B (Llama 3)", 32, 4096, 14336, 128256, AttentionShape(32, 8, 128, 128**-0.5)),
)


class Stack:
    """The layers of a model over `CudaOperations`, with random weights in bfloat16 and no embedding
    of tokens.
    """

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
        self._norm = Norm(torch.ones(model.width, device="cuda"), 1e-5)
        self._embedded = torch.randn(4096, model.width, dtype=torch.bfloat16, device="cuda")
        self._angles = torch.rand(4096, model.shape.head_dim // 2, device="cuda")

    def _pack(self, rows: int, columns: int, *, wide: bool = False) -> Product:
        weight = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * columns**-0.5
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


def plan_of(contexts: list[int], rows: int) -> StepPlan:
    """Sequences of `rows` rows each, with blocks one after another."""
    count, width = len(contexts), -(-max(contexts) // BLOCK_SIZE)
    tables = torch.arange(count * width, dtype=torch.int32).view(count, width)
    positions = torch.cat([torch.arange(context - rows, context) for context in contexts])
    seats = torch.arange(count, dtype=torch.int32)
    blocks = tables[seats.long().repeat_interleave(rows), positions // BLOCK_SIZE].long()
    return StepPlan(
        num_tokens=count * rows,
        num_decodes=count if rows == 1 else 0,
        longest=max(contexts),
        token_ids=torch.randint(4096, (count * rows,)),
        positions=positions,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        firsts=seats * rows,
        lengths=torch.full((count,), rows, dtype=torch.int32),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        seats=seats,
        tables=tables,
        sample_at=torch.arange(1, count + 1) * rows - 1,
    )


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """The median, by the device's clock, after three unmeasured."""
    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def roofline() -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and operations per second of a product in
    bfloat16.
    """
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * source.numel() / seconds(lambda: target.copy_(source)), 2 * 8192**3 / seconds(
        lambda: a @ b
    )


def report() -> None:
    """Print one line for each step."""
    bandwidth, peak = roofline()
    print(
        f"{torch.cuda.get_device_name(0)}: copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product "
        f"{peak / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    with torch.inference_mode():
        for model in MODELS:
            _report_model(model, bandwidth, peak)
            torch.cuda.empty_cache()


def _report_model(model: Model, bandwidth: float, peak: float) -> None:
    blocks = max(max(BATCHES) * CONTEXT, PROMPT) // BLOCK_SIZE
    size = (blocks, model.shape.num_kv_heads, model.layers, 2, BLOCK_SIZE, model.shape.head_dim)
    cache = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    limits = StepLimits(PROMPT, max(BATCHES), PROMPT, BLOCK_SIZE)
    copy = PlanCopy(cache.device, limits)
    stack = Stack(model, CudaOperations(cache, model.shape, limits))
    graphs = Graphs(copy, stack, lambda plan: None, longest=PROMPT)
    graphs.capture(max(BATCHES))
    for batch in BATCHES:
        plan = plan_of([CONTEXT] * batch, 1)
        eager = seconds(lambda plan=plan: stack(copy.place(plan)))
        graph = seconds(lambda plan=plan: graphs.logits(plan))
        floor = 2 * (model.weights + batch * CONTEXT * model.kv_numbers) / bandwidth
        print(
            f"{model.name} decode {batch} x {CONTEXT}: {graph * 1e3:.2f} ms as a graph, "
            f"{eager * 1e3:.2f} ms without; "
            f"floor {floor * 1e3:.2f} ms, {floor / graph:.0%} of the bandwidth",
            flush=True,
        )
    plan = plan_of([PROMPT], PROMPT)
    took = seconds(lambda: stack(copy.place(plan)))
    work = (
        2 * PROMPT * (model.weights - model.width * model.vocab)
        + PROMPT**2 * model.layers * 2 * model.shape.num_heads * model.shape.head_dim
    )
    print(
        f"{model.name} prefill {PROMPT}: {took * 1e3:.2f} ms; floor {work / peak * 1e3:.2f} ms, "
        f"{work / peak / took:.0%} of the peak",
        flush=True,
    )
