"""The settings of a batch's rows as arrays, made from requests by plain arithmetic.

A row is all that a draw depends on: nothing of its neighbours, its place in the
batch or the request's name is in it.  Tokens are chosen from these by
`model.sampling.picking`, or by the C kernel that gives the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.engine.batch import SamplePlace
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.sampling.randomness import uniforms

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them overflows, which changes nothing
(vLLM's limit).
"""

LEAST_TOP_P = 1e-9
"""Keeps the best token alone, as any smaller share does."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Settings of R rows, each an array of [R].

    inverse_temperature: 0 for a greedy row, whose other fields then mean nothing.
    top_k:               tokens kept, 0 for all.
    top_p:               share kept of what min_p and top_k leave; 1 for all.
    min_p:               least weight kept, as a share of the best token's; 0 for all.
    u:                   the place of the draw, in [0, 1].
    """

    inverse_temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    u: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.inverse_temperature)

    @property
    def is_drawn(self) -> NDArray[np.bool_]:
        """Rows that are not greedy."""
        return self.inverse_temperature > 0

    @property
    def is_cut(self) -> NDArray[np.bool_]:
        """Drawn rows whose tokens must be put in order first."""
        return self.is_drawn & ((self.top_k > 0) | (self.top_p < 1))

    def take(self, places: NDArray[np.int64]) -> "Rows":
        """The rows at these places, in their order."""
        return Rows(
            self.inverse_temperature[places],
            self.top_k[places],
            self.top_p[places],
            self.min_p[places],
            self.u[places],
        )


def plan_rows(requests: Sequence[SamplePlace], vocab_size: int) -> Rows:
    """One row for each request, for its next token or the one after its drafts."""
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
