"""Choice of a prefill worker among candidates: the lowest cost, ties decided by a seeded draw [Y10].

The same candidates and the same state of the generator give the same choice,
whatever order the candidates come in.  Who is a candidate (ready, matched,
with credit) is the caller's business.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from pdcluster_worker.routing_config import PrefillScorePolicy


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker: tokens of the prompt in its prefix cache, and tokens that wait there."""

    key: str
    matched_tokens: int
    queued_tokens: int


def choose_prefill(policy: PrefillScorePolicy, candidates: Iterable[PrefillCandidate], tie: Random) -> str:
    """The key with the lowest load_weight * queued_tokens - prefix_weight * matched_tokens.  ValueError without candidates."""
    costs = {c.key: policy.load_weight * c.queued_tokens - policy.prefix_weight * c.matched_tokens for c in candidates}
    return tie.choice(_cheapest(costs))


def _cheapest(costs: Mapping[str, float]) -> list[str]:
    """All keys of the lowest cost, sorted, so that a draw does not depend on the candidates' order."""
    if not costs:
        raise ValueError("no candidate to choose from: ask only with at least one worker")
    lowest = min(costs.values())
    return sorted(key for key, cost in costs.items() if cost == lowest)
