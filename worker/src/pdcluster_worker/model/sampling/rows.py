"""Sampling settings of a batch as arrays; a row's draw depends on nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.engine.request import SamplePlace
from pdcluster_worker.messages.requests import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in (0, 1) from each (seed, position) alone, of 53 random bits.

    So a request draws the same on every worker and after preemption or migration.
    position: index of the token, prompt and output together.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        state = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
        bits = _mix(state + np.array(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's next outputs for these states (Steele, Lea, Flood 2014)."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


GREEDY_BELOW = 1e-5  # lower temperatures are 0, since dividing by them overflows (vLLM's limit)

LEAST_TOP_P = 1e-9  # keeps only the best token, as any smaller value does


@dataclass(frozen=True, slots=True)
class Rows:
    """Each an array of [R]."""

    inverse_temperature: NDArray[np.float32]  # 0 = greedy
    top_k: NDArray[np.int64]  # 0 = all
    top_p: NDArray[np.float64]  # 1 = all
    min_p: NDArray[np.float32]  # relative to the best token's weight; 0 = all
    u: NDArray[np.float64]  # position of the draw, in [0, 1]

    def __len__(self) -> int:
        return len(self.inverse_temperature)

    @property
    def is_drawn(self) -> NDArray[np.bool_]:
        return self.inverse_temperature > 0

    @property
    def is_cut(self) -> NDArray[np.bool_]:
        """Sampled rows with top_k or top_p."""
        return self.is_drawn & ((self.top_k > 0) | (self.top_p < 1))

    def take(self, places: NDArray[np.int64]) -> "Rows":
        return Rows(
            self.inverse_temperature[places],
            self.top_k[places],
            self.top_p[places],
            self.min_p[places],
            self.u[places],
        )


def plan_rows(requests: Sequence[SamplePlace], vocab_size: int) -> Rows:
    """A row per request, for its next token or the one after its drafts."""
    samplings = [request.sampling for request in requests]
    return Rows(
        np.array([_inverse_temperature(sampling) for sampling in samplings], dtype=np.float32),
        np.array([_top_k(sampling, vocab_size) for sampling in samplings], dtype=np.int64),
        np.maximum([sampling.top_p for sampling in samplings], LEAST_TOP_P, dtype=np.float64),
        np.abs(np.array([sampling.min_p for sampling in samplings], dtype=np.float32)),  # no -0.0
        uniforms([sampling.seed for sampling in samplings], [r.num_tokens for r in requests]),
    )


def _inverse_temperature(sampling: SamplingParams) -> float:
    # The one best token is the greedy one, whatever the temperature.
    is_greedy = sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
    return 0.0 if is_greedy else 1 / sampling.temperature


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    return sampling.top_k if 0 < sampling.top_k < vocab_size else 0
