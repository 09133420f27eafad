"""Work of an engine's steps, and its sums."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.request import Scheduled


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Work of one step.

    rows:     tokens that are computed, those of decodes and of chunks
    context:  tokens that the decodes attend to, summed
    pairs:    tokens that each token of a chunk attends to, summed
    samples:  requests that get a token
    """

    rows: int
    context: int = 0
    pairs: int = 0
    samples: int = 0


def work_of(items: Sequence[Scheduled]) -> SimulatedStep:
    rows = context = pairs = samples = 0
    for item in items:
        rows += item.num_tokens
        samples += item.samples
        if item.num_tokens == 1:
            context += item.start + 1
        else:
            pairs += item.num_tokens * item.start + item.num_tokens * (item.num_tokens + 1) // 2
    return SimulatedStep(rows, context, pairs, samples)


@dataclass(slots=True)
class StepTotals:
    """busy_seconds: in steps; prefill_seconds: the part of them that chunks take."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def count(self, items: Sequence[Scheduled], work: SimulatedStep, seconds: float) -> None:
        num_decodes = len([item for item in items if item.num_tokens == 1 and item.samples])
        prompt_tokens = work.rows - num_decodes
        self.num_steps += 1
        self.busy_seconds += seconds
        self.prompt_tokens += prompt_tokens
        self.output_tokens += work.samples
        self.prefill_seconds += seconds * prompt_tokens / max(1, work.rows)
