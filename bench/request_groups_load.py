"""The loads of `bench/request_groups.py`: classes of requests with deadlines.  Pure.

Times are in units: seconds of a token in a full batch, as measured at the start.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams

PROMPT_TOKENS, VOCABULARY = 32, (10, 500)  # tokens that any model has

Load = Literal["batches", "stream"]


@dataclass(frozen=True, slots=True)
class SloClass:
    """Requests with one deadline; their answers have about `mean_output` tokens."""

    name: str
    num_requests: int
    slo_units: float  # from the arrival
    mean_output: int


CLASSES: dict[Load, tuple[SloClass, ...]] = {
    # Sizes, and what can be in time, after the experiment of the source document: its 54.1 and
    # 71.8 % of 85 requests are groups of 15, 46 and 24 of which one and two are in time.
    "batches": (
        SloClass("I", 15, 330, 30),
        SloClass("B1", 46, 1100, 55),
        SloClass("B2", 24, 1300, 115),
    ),
    "stream": (
        SloClass("chat", 180, 150, 20),
        SloClass("assist", 90, 300, 60),
        SloClass("report", 30, 800, 200),
    ),
}
SLOTS: dict[Load, int] = {"batches": 4, "stream": 8}
MAX_TOKENS = {"batches": 340, "stream": 400}
"""The longest answer that a request may give, as the document's 8192 over its mean of 2646."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    seconds: float
    slo_class: str
    spec: RequestSpec
    num_tokens: int  # of its answer


def preset_tokens(load: Load) -> int:
    """The mean answer of all classes: too long for the short ones, too short for the long ones."""
    classes = CLASSES[load]
    return round(
        sum(each.num_requests * each.mean_output for each in classes)
        / sum(each.num_requests for each in classes)
    )


def granularity(load: Load, unit_seconds: float) -> float:
    """A step of deadlines in which no two classes are, a fifth of the shortest one."""
    return unit_seconds / 5 * min(each.slo_units for each in CLASSES[load])


def timed_requests(
    load: Load, unit_seconds: float, seed: str, times: float, slack: float
) -> list[TimedRequest]:
    """All at once in a random order, or Poisson at `times` the capacity.

    slack: factor of all deadlines.
    """
    draw = random.Random(seed)
    classes = [replace(kind, slo_units=slack * kind.slo_units) for kind in CLASSES[load]]
    kinds = [each for each in classes for _ in range(each.num_requests)]
    draw.shuffle(kinds)
    rate = times * SLOTS[load] / (preset_tokens(load) * unit_seconds)
    at, found = 0.0, []
    for number, kind in enumerate(kinds):
        found.append(request_of(f"{seed} {number}", kind, at, unit_seconds, MAX_TOKENS[load]))
        at += 0.0 if load == "batches" else draw.expovariate(rate)
    return found


def warm_up(load: Load, unit_seconds: float, each: int = 6) -> list[TimedRequest]:
    """Some of each class, which do not count: estimators learn from them."""
    kinds: Sequence[SloClass] = [kind for kind in CLASSES[load] for _ in range(each)]
    return [
        request_of(f"warm {number}", kind, 0.0, unit_seconds, MAX_TOKENS[load])
        for number, kind in enumerate(kinds)
    ]


def request_of(
    request_id: str, kind: SloClass, seconds: float, unit_seconds: float, max_tokens: int
) -> TimedRequest:
    draw = random.Random(request_id)
    output = max(2, round(kind.mean_output * draw.uniform(0.8, 1.2)))
    prompt = [draw.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    deadline = kind.slo_units * unit_seconds
    spec = RequestSpec(request_id, prompt, sampling, deadline_seconds=deadline)
    return TimedRequest(seconds, kind.name, spec, output)
