"""Servers of `bench/waiting_time.py`: a simulated engine, and what both it and the real one do
between two ends.

A server runs the jobs that it was given, one token each a step, until one
ends.  The simulated one's step takes longer with more requests, with more
context, and the longer it has been serving: the source document's probe of
equal requests rises from 8.81 to 10.08 ms a token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, exp, inf

from waiting_time_load import Job


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: (base + request * (batch - 1) + context * tokens in the KV cache) * (1 +
    drift).

    drift:          by which steps become slower at last; it comes with completions,
                    `drift_requests` of them for 63 %.
    prefill_tokens_per_second: of a prompt, during which nothing is decoded.
    """

    base: float = 0.00799
    request: float = 0.0006
    context: float = 1.65e-7
    drift: float = 0.277
    drift_requests: float = 15.0
    prefill_tokens_per_second: float = 2500.0

    def steps(self, count: int, batch: int, tokens: int, num_ended: int) -> float:
        """Seconds of `count` steps that begin with so many tokens in the cache."""
        slower = 1.0 + self.drift * (1.0 - exp(-num_ended / self.drift_requests))
        one = self.base + self.request * (batch - 1) + self.context * tokens
        return slower * (count * one + self.context * batch * count * (count - 1) / 2)


class Server(ABC):
    """Jobs on an engine, its clock, and the integral of their number over time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: list[Job] = []
        self.num_ended = 0
        self.batch_area = 0.0

    def start(self, job: Job) -> None:
        """Give a job to the engine: one that was evicted goes on after the tokens that it has."""
        job.started = min(job.started, self.now)
        self.running.append(job)

    def evict(self, job: Job) -> None:
        """Take a job back."""
        self.running.remove(job)
        job.num_evicted += 1

    @abstractmethod
    def advance(self, until: float) -> list[Job]:
        """Go on until a job ends, or until that time; the jobs that ended."""

    def passed(self, seconds: float) -> None:
        """Count time that has passed with the jobs of now."""
        self.batch_area += seconds * len(self.running)

    def token(self, job: Job) -> None:
        """Count a first token."""
        if job.first == inf:
            job.first, job.batch_area = self.now, self.batch_area

    def end(self, jobs: list[Job]) -> list[Job]:
        """Take jobs that have all tokens from the engine."""
        for job in jobs:
            job.ended = self.now
            self.running.remove(job)
            self.num_ended += 1
        return jobs


class SimulatedServer(Server):
    """Computes when things happen; no time passes."""

    def __init__(self, cost: StepCost | None = None) -> None:
        super().__init__()
        self.cost = cost or StepCost()

    def start(self, job: Job) -> None:
        """Prefill, which the others wait for, and the first token."""
        super().start(job)
        seconds = (job.prompt_tokens + job.flight.num_tokens) / self.cost.prefill_tokens_per_second
        self._pass(seconds)
        job.prefill_seconds += seconds
        self._pass(self.cost.steps(1, 1, job.prompt_tokens, self.num_ended))
        job.flight.num_tokens += 1
        self.token(job)

    def advance(self, until: float) -> list[Job]:
        """As many steps as it takes."""
        left = min(job.output_tokens - job.flight.num_tokens for job in self.running)
        batch = len(self.running)
        tokens = sum(job.prompt_tokens + job.flight.num_tokens for job in self.running)
        count = left
        if until < inf:
            one = self.cost.steps(1, batch, tokens, self.num_ended)
            count = min(left, max(1, ceil((until - self.now) / one)))
        self._pass(self.cost.steps(count, batch, tokens, self.num_ended) if count > 0 else 0.0)
        for job in self.running:
            job.flight.num_tokens += max(0, count)
        return self.end([job for job in self.running if job.flight.num_tokens >= job.output_tokens])

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.passed(seconds)
