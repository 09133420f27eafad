"""Policies under load, on a model of one prefill and one decode worker: never much worse than the
better of both sides.

Each worker computes one prompt after the other; a remote one pays for its way.  Real workers:
`bench/offload_curve.py`.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from pdcluster_schema.policy import OffloadPolicy
from pdcluster_schema.routing import OffloadPolicyName
from pdcluster_worker.routing.offload import OffloadFacts, decide
from pdcluster_worker.routing.ttft import Side, SloFeedback, TtftEstimates

LENGTHS = (32, 64, 128, 256, 512, 1024)
CAPACITY = 6 / sum(LENGTHS) * 1000  # requests a second of a worker that computes 1000 tokens in one

LOADS = (0.1, 0.2, 0.5, 0.9, 1.3)
"""Share of what one worker can do."""

Goes = Callable[["Pair", int, float], bool]


@dataclass
class Pair:
    """Tokens per second of each side; seconds that a request takes on its way, beside its tokens'
    part.
    """

    local: float
    remote: float
    way: float

    def run(self, load: float, goes: Goes, count: int = 1500) -> float:
        """Mean time to the first token of the second half."""
        source = random.Random(7)
        self.feedback, self.free_at, self.starts = (
            SloFeedback(),
            {"local": 0.0, "remote": 0.0},
            list[float](),
        )
        self.costs = TtftEstimates()
        now, took, ends = 0.0, list[float](), list[tuple[float, Side, int, float, str, float]]()
        for number in range(count):
            now += source.expovariate(load * CAPACITY)
            tokens = source.choice(LENGTHS)
            while ends and ends[0][0] <= now:
                at, ended, length, seconds, name, prefill = heapq.heappop(ends)
                self.feedback.first_token(ended, length, seconds, at)
                self.costs.first_token(ended, name, length, prefill, at)
            side: Side = "remote" if goes(self, tokens, now) else "local"
            self.costs.sent(side, str(number), tokens, now)
            prefill = tokens / (self.remote if side == "remote" else self.local)
            start = max(now, self.free_at[side])
            end = self.free_at[side] = start + prefill
            if side == "remote":
                self.starts = [each for each in self.starts if each > now] + [start]
                end += self.way + tokens * 2e-5
            took.append(end - now)
            heapq.heappush(ends, (end, side, tokens, end - now, str(number), prefill))
        return mean(took[count // 2 :])

    def by(self, name: OffloadPolicyName) -> Goes:
        policy = OffloadPolicy(policy=name)

        def goes(pair: "Pair", tokens: int, now: float) -> bool:
            waiting = sum(start > now for start in pair.starts)
            facts = OffloadFacts(prompt_tokens=tokens, prefill_queue=waiting)
            threshold = 256
            if name == "sloFeedback":
                threshold = pair.feedback.threshold_for(tokens, policy.slo_feedback, threshold, now)
            verdict = decide(policy, pair.costs.known(facts, now), threshold)
            probes = name == "measured" and tokens >= policy.min_offload_length
            return (pair.costs.or_probe(verdict, now) if probes else verdict).is_remote

        return goes


PAIRS = {
    "equal": Pair(1000, 1000, 0.02),
    "prefill is faster": Pair(500, 2000, 0.02),
    "prefill is twice as fast": Pair(1000, 2000, 0.02),
    "prefill is half as fast": Pair(1000, 500, 0.02),
    "prefill is slower": Pair(1000, 300, 0.05),
    "a long way": Pair(1000, 1000, 1.0),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", PAIRS)
def test_policies_that_measure_are_never_much_worse_than_the_better_side(
    name: str, load: float
) -> None:
    pair = PAIRS[name]
    better = min(pair.run(load, lambda *_: False), pair.run(load, lambda *_: True))

    assert pair.run(load, pair.by("measured")) <= 1.05 * better
    assert pair.run(load, pair.by("sloFeedback")) <= 1.25 * better


def test_rule_without_measurements_is_far_worse_with_a_slow_prefill_worker() -> None:
    pair = PAIRS["prefill is slower"]

    assert pair.run(0.5, pair.by("rule")) > 5 * pair.run(0.5, lambda *_: False)
    assert pair.run(0.5, pair.by("measured")) < pair.run(0.5, lambda *_: False)
