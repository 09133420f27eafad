"""The loads of `bench/waiting_time.py`: request groups with bimodal answers, after the source
document.  Pure.

The document publishes sizes, deadlines and mean outputs of its groups, and of
its answers that they have 3 to 8000 tokens, pile up below 500 and above 3500,
and have a coefficient of variation of 1.02.  Lengths are drawn to these.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from pdcluster_worker.routing.waiting_time.rates import Presets
from pdcluster_worker.routing.waiting_time.request_queue import QueuedRequest

SHORT, LONG = (3, 500), (3500, 8000)
"""Tokens of the two modes; inside a mode short answers are likelier, by the square of a draw."""

PROMPT_TOKENS = 250
PRESETS = Presets(
    token_seconds=0.00952,
    output_tokens=2646.0,
    max_output_tokens=8192,
    prefill_tokens_per_second=2500.0,
)
"""mu is not published: B3's 1916 is 27.6 % below it.  Nor is P; a prompt takes 0.1 s here."""


@dataclass(frozen=True, slots=True)
class Group:
    """One request group.

    slo_seconds: from the start of the run.
    mean_output: tokens of its answers, which are bimodal about it, or alike: within a fifth of it.
    """

    name: str
    num_requests: int
    slo_seconds: float
    mean_output: float
    is_bimodal: bool = True


PAPER = (
    Group("I", 10, 430, 2618),
    Group("B1", 15, 520, 2618),
    Group("B2", 20, 860, 2443),
    Group("B3", 15, 1320, 1916),
)
"""60 requests."""

ATTAINMENT = (
    Group("I", 15, 260, 600, False),
    Group("B1", 46, 1560, 2646, False),
    Group("B2", 24, 2000, 4300, False),
)
"""85 requests in 3 groups with lengths of their own.

The document says no more of it.  Its 54.1 and 71.8 % of 85 are 46 and 61 requests, so groups of 15,
46 and 24 where a group is in time as a whole; lengths and deadlines are ours, such that I, whose
answers are short, can be in time.
"""


@dataclass(slots=True, eq=False)
class Job:
    """A request of a run, and what happened to it; seconds of the server's clock.

    batch_area: integral of the running requests over time, when its first token came.
    num_evicted: times that it was taken back from the engine.
    """

    name: str
    group: str
    prompt_tokens: int
    output_tokens: int
    flight: QueuedRequest
    started: float = inf
    first: float = inf
    ended: float = inf
    prefill_seconds: float = 0.0
    batch_area: float = 0.0
    num_evicted: int = 0
    tokens: list[int] = field(default_factory=list)


def bimodal(source: random.Random, mean: float) -> int:
    """Tokens of one answer; the share of long ones follows from the mean."""
    low, high = _mode_mean(SHORT), _mode_mean(LONG)
    share = min(1.0, max(0.0, (mean - low) / (high - low)))
    least, most = LONG if source.random() < share else SHORT
    return least + round((most - least) * source.random() ** 2)


def _mode_mean(mode: tuple[int, int]) -> float:
    return mode[0] + (mode[1] - mode[0]) / 3


def jobs(
    groups: Sequence[Group], seed: str, scale: float = 1.0, prompt_tokens: int = PROMPT_TOKENS
) -> list[Job]:
    """Requests of all groups, group by group.  scale: of all output lengths."""
    found = []
    for group in groups:
        for number in range(group.num_requests):
            source = random.Random(f"{seed} {group.name} {number}")
            drawn = (
                bimodal(source, group.mean_output)
                if group.is_bimodal
                else group.mean_output * source.uniform(0.8, 1.2)
            )
            output = max(2, round(scale * drawn))
            most = round(scale * PRESETS.max_output_tokens)
            flight = QueuedRequest(
                group.name, prompt_tokens, max_tokens=most, due_seconds=group.slo_seconds
            )
            found.append(
                Job(f"{seed} {group.name} {number}", group.name, prompt_tokens, output, flight)
            )
    return found


def probe(count: int = 30, mean: float = 2618.0) -> list[Job]:
    """The document's probe: equal requests, one after the other."""
    output = round(mean)
    return [
        Job(
            f"probe {n}",
            "probe",
            PROMPT_TOKENS,
            output,
            QueuedRequest("probe", PROMPT_TOKENS, PRESETS.max_output_tokens),
        )
        for n in range(count)
    ]
