"""Policies under load, on a model of one prefill and one decode worker: never much worse than the better of both sides.

Each worker computes one prompt after the other; a remote one pays for its way.  Real workers: `bench/offload_curve.py`.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from pdcluster_worker.routing.offload import OffloadFacts, decide
from pdcluster_worker.routing.slo_feedback import Side, SloFeedback
from pdcluster_worker.routing_config import OffloadPolicy, OffloadPolicyName

LENGTHS = (32, 64, 128, 256, 512, 1024)
CAPACITY = 6 / sum(LENGTHS) * 1000  # requests a second of a worker that computes 1000 tokens in one

LOADS = (0.2, 0.5, 0.9, 1.3)
"""Of what one worker can do."""

Goes = Callable[["Pair", int, float], bool]


@dataclass
class Pair:
    """Tokens per second of each side; seconds that a request takes on its way, beside its tokens' part."""

    local: float
    remote: float
    way: float

    def run(self, load: float, goes: Goes, count: int = 1500) -> float:
        """Mean time to the first token of the second half."""
        source = random.Random(7)
        self.feedback, self.free_at, self.starts = SloFeedback(), {"local": 0.0, "remote": 0.0}, list[float]()
        now, took, ends = 0.0, list[float](), list[tuple[float, Side, int, float]]()
        for _ in range(count):
            now += source.expovariate(load * CAPACITY)
            tokens = source.choice(LENGTHS)
            while ends and ends[0][0] <= now:
                at, ended, length, seconds = heapq.heappop(ends)
                self.feedback.first_token(ended, length, seconds, at)
            side: Side = "remote" if goes(self, tokens, now) else "local"
            start = max(now, self.free_at[side])
            end = self.free_at[side] = start + tokens / (self.remote if side == "remote" else self.local)
            if side == "remote":
                self.starts = [each for each in self.starts if each > now] + [start]
                end += self.way + tokens * 2e-5
            took.append(end - now)
            heapq.heappush(ends, (end, side, tokens, end - now))
        return mean(took[count // 2 :])

    def by(self, name: OffloadPolicyName) -> Goes:
        policy = OffloadPolicy(policy=name)

        def goes(pair: "Pair", tokens: int, now: float) -> bool:
            waiting = sum(start > now for start in pair.starts)
            facts = OffloadFacts(prompt_tokens=tokens, prefill_queue=waiting)
            threshold = 256
            if name == "sloFeedback":
                threshold = pair.feedback.threshold_for(tokens, policy.slo_feedback, threshold, now)
            return decide(policy, facts, threshold).is_remote

        return goes


PAIRS = {
    "equal": Pair(1000, 1000, 0.02),
    "prefill is faster": Pair(500, 2000, 0.02),
    "prefill is slower": Pair(1000, 300, 0.05),
    "a long way": Pair(1000, 1000, 1.0),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", PAIRS)
def test_slo_feedback_is_never_much_worse_than_the_better_side(name: str, load: float) -> None:
    pair = PAIRS[name]
    local = pair.run(load, lambda *_: False)
    remote = pair.run(load, lambda *_: True)
    followed = pair.run(load, pair.by("sloFeedback"))
    assert followed <= 1.15 * min(local, remote)
