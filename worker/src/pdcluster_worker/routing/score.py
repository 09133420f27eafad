"""Choice of a prefill worker among candidates: the lowest cost, ties decided by a seeded draw.

The same candidates and the same state of the generator give the same choice,
whatever order the candidates come in.  The caller chooses the candidates (ready, matched,
with credit).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from pdcluster_worker.config.routing import PrefillScorePolicy


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker that may compute a prompt.

    matched_tokens:   of the prompt, in its prefix cache.
    queued_tokens:    that wait there.
    transfer_seconds: that the KV is expected to take from there; 0 = not measured.
    """

    key: str
    matched_tokens: int
    queued_tokens: int
    transfer_seconds: float = 0.0


def choose_prefill(
    policy: PrefillScorePolicy, candidates: Iterable[PrefillCandidate], tie: Random
) -> str:
    """The key with the lowest cost, as `PrefillScorePolicy` has it.

    ValueError without candidates.
    """
    costs = {
        c.key: policy.load_weight * c.queued_tokens
        - policy.prefix_weight * c.matched_tokens
        + policy.transfer_weight * 1000 * c.transfer_seconds
        for c in candidates
    }
    return tie.choice(_cheapest(costs))


def _cheapest(costs: Mapping[str, float]) -> list[str]:
    """All keys of the lowest cost, sorted, so that a draw does not depend on the
    candidates' order.
    """
    if not costs:
        raise ValueError("no candidate to choose from: ask only with at least one worker")
    lowest = min(costs.values())
    return sorted(key for key, cost in costs.items() if cost == lowest)
