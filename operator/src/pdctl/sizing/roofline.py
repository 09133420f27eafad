"""Profiles without measured kernels: bytes and operations over a data sheet's rates.

An estimate: a step takes the longer of its products and of reading their weights, then its
attention, which reads the KV of streams and computes between the tokens of prompts, at the shares
of the rates below.  Communication between ranks and the host's work are in the shares, and nowhere
else.
"""

import math
from dataclasses import dataclass

from pdcluster_schema.accelerators import Accelerator
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import EngineProfile, RankLayout, prompt_scatter
from pdctl.sizing.shape import TransformerShape
from pdctl.sizing.tables import BUDGETS, MAX_PROMPT_TOKENS, MEMORY_SHARE, PROMPTS, STREAMS

SOURCE = "our roofline of schema/accelerators.yaml"
COMPUTE_SHARE, READ_SHARE = 0.4, 0.5
"""Shares of both rates that measured kernels reach: Llama-3.1-70B FP8 on B200, TP2, a prompt of
6000 tokens and 64 streams, in the tables of vLLM 0.24."""
_KV_BYTES = 2  # of a value


@dataclass(frozen=True)
class _WorkerRates:
    """Per second of one worker, all ranks together.  attended: operations of attention"""

    operations: float
    attended: float
    read: float


def can_estimate(accelerator: Accelerator) -> bool:
    numbers = (accelerator.memory_bytes, accelerator.bandwidth_bytes, accelerator.bf16_flops)
    return all(number is not None for number in numbers)


def sequence_kv_bytes(shape: TransformerShape, num_tokens: int) -> int:
    return _KV_BYTES * shape.kv.values(num_tokens)


def roofline_profile(
    gpu: str,
    accelerator: Accelerator,
    layout: RankLayout,
    shape: TransformerShape,
    goal: Objective,
) -> EngineProfile | None:
    """None where weights and the KV of one prompt do not fit."""
    memory, read = accelerator.memory_bytes or 0, float(accelerator.bandwidth_bytes or 0)
    rates = _WorkerRates(
        COMPUTE_SHARE * _operations(accelerator, shape) * layout.gpus,
        COMPUTE_SHARE * float(accelerator.bf16_flops or 0) * layout.gpus,
        READ_SHARE * read * layout.gpus,
    )
    tokens = sum(goal.stream)
    kv_tokens = _kv_tokens(memory, layout, shape, tokens)
    if kv_tokens < goal.longest_tokens:
        return None
    context_bytes = sequence_kv_bytes(shape, goal.stream[0] + goal.stream[1] // 2)
    ranks = layout.data

    def seconds(prompt_tokens: float, streams: int, attended: float) -> float:
        computed = ranks * (prompt_tokens + streams)
        operations = 2.0 * shape.active_weights * computed
        weights = shape.weights_read(int(computed), ranks) * shape.weight_bytes
        attention = attended / rates.attended + streams * context_bytes / rates.read
        return max(operations / rates.operations, weights / rates.read) + ranks * attention

    def prefill(tokens: float, cached: float) -> float:
        return seconds(tokens - cached, 0, shape.attended(tokens) - shape.attended(cached))

    scatter = prompt_scatter(goal, kv_tokens, prefill)
    cached = scatter.cached_tokens
    computed = goal.input_tokens - cached
    attended = shape.attended(goal.input_tokens) - shape.attended(cached)

    def mixed(budget: int, streams: int) -> float:
        chunk = budget - streams
        return seconds(chunk, streams, attended * chunk / computed)

    streams = [n for n in STREAMS if n * tokens <= kv_tokens]
    prompts = [n for n in PROMPTS if n == 1 or n * goal.input_tokens <= MAX_PROMPT_TOKENS]
    return EngineProfile(
        gpu=gpu,
        layout=layout,
        prefill={
            n: seconds(n * computed, 0, n * attended) + n * scatter.uneven_seconds for n in prompts
        },
        decode={n: seconds(0, n, 0.0) for n in streams},
        mixed={(budget, n): mixed(budget, n) for budget in BUDGETS for n in streams},
        kv_tokens={math.inf: kv_tokens},
        source=SOURCE,
        scatter=scatter,
    )


def _operations(accelerator: Accelerator, shape: TransformerShape) -> float:
    """FP8 where weights have 8 bits, activations too, and the type computes in it; 4-bit weights
    in 8 at most.
    """
    dense = float(accelerator.bf16_flops or 0)
    is_small = shape.weight_bytes <= 1.0 and not shape.is_weight_only
    return float(accelerator.fp8_flops or dense) if is_small else dense


def _kv_tokens(memory: int, layout: RankLayout, shape: TransformerShape, length: int) -> int:
    """Tokens, in sequences of a length, of a data-parallel rank; its tensor ranks share the KV."""
    held = shape.weights_of_rank(layout.tensor, layout.gpus) * shape.weight_bytes
    free = MEMORY_SHARE * memory - held
    of_sequence = sequence_kv_bytes(shape, length) * shape.kv.share(layout.tensor)
    return max(0, int(free * length / of_sequence))
