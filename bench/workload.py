"""The loads of the bench: how long prompts and answers are, and when requests arrive.

Everything follows from the seed, so each system of a round gets the same
prompts at the same times, and no two rounds or workloads share a prompt (a
prefix cache has nothing to answer from).  Knows no system and no clock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

_FIRST_PLAIN_TOKEN = 256  # special tokens and single bytes stand below it in the vocabularies that we measure
_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One load.

    concurrency: closed loop with so many requests at a time; None for an open loop.
    rate:        open loop with Poisson arrivals, so many a second; None for a closed loop.
    rounds:      how often it is measured by default.
    """

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    rounds: int
    concurrency: int | None = None
    rate: float | None = None

    def describe(self) -> str:
        """One line for a report."""
        arrival = f"Poisson, {self.rate:g} per s" if self.rate else f"closed loop, {self.concurrency} at a time"
        return f"{self.num_prompt_tokens} in / {self.num_output_tokens} out, {self.num_requests} requests a round, {arrival}"

    def warm_up(self) -> "Workload":
        """A short closed loop of the same prompt length."""
        num_output_tokens = min(_WARM_UP_TOKENS, self.num_output_tokens)
        return replace(self, num_requests=_WARM_UP_REQUESTS, num_output_tokens=num_output_tokens, concurrency=_WARM_UP_REQUESTS, rate=None)

    def prompts(self, seed: str, vocab_size: int) -> list[list[int]]:
        """Uniformly random token ids, one list a request."""
        source = random.Random(f"prompts {self.name} {seed}")
        return [[source.randrange(_FIRST_PLAIN_TOKEN, vocab_size) for _ in range(self.num_prompt_tokens)] for _ in range(self.num_requests)]

    def arrivals(self, seed: str) -> list[float]:
        """Seconds from the start of an open loop to each request: exponential gaps, scaled so that the mean rate is exact."""
        source = random.Random(f"arrivals {self.name} {seed}")
        rate = self.rate or 0.0
        times = list(accumulate(source.expovariate(rate) for _ in range(self.num_requests)))
        scale = self.num_requests / rate / times[-1]
        return [time * scale for time in times]


# Sizes of B: two rounds show the noise, one of twice as many would not; with 16 requests all of it takes 10 minutes on 2 cores.
FULL: Sequence[Workload] = (
    Workload("A", 256, 64, 48, rounds=3, concurrency=16),
    Workload("B 0.5/s", 1024, 32, 16, rounds=2, rate=0.5),
    Workload("B 1.0/s", 1024, 32, 16, rounds=2, rate=1.0),
)
QUICK: Sequence[Workload] = (
    Workload("A", 32, 8, 6, rounds=1, concurrency=3),
    Workload("B 2.0/s", 300, 4, 3, rounds=1, rate=2.0),
)
