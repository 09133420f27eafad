"""Choice of a prefill worker: the lowest cost, ties decided by a seeded draw."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from pdcluster_schema.routing import PrefillScoreSpec


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    key: str
    matched_tokens: int  # of the prompt, in its prefix cache
    queued_tokens: int
    transfer_seconds: float = 0.0  # expected; 0 = not measured


def choose_prefill(
    policy: PrefillScoreSpec, candidates: Iterable[PrefillCandidate], tie: Random
) -> str:
    """Raises ValueError without candidates."""
    costs = {
        c.key: policy.load_weight * c.queued_tokens
        - policy.prefix_weight * c.matched_tokens
        + policy.transfer_weight * 1000 * c.transfer_seconds
        for c in candidates
    }
    return tie.choice(_cheapest(costs))


def _cheapest(costs: Mapping[str, float]) -> list[str]:
    """Sorted, so that a draw does not depend on the candidates' order."""
    if not costs:
        raise ValueError("no candidate to choose from: ask only with at least one worker")
    lowest = min(costs.values())
    return sorted(key for key, cost in costs.items() if cost == lowest)
