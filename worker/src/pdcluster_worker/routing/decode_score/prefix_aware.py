"""`prefixAware`: the worker that has most of the prompt in its prefix cache."""

from collections.abc import Sequence

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate
from pdcluster_worker.routing.decode_score.load import least_request


def prefix_aware(candidates: Sequence[DecodeCandidate]) -> dict[str, float]:
    """Cost: minus the blocks matched; among equals the fewest requests, and this worker of those.

    >>> most = DecodeCandidate("most", num_requests=9, matched_blocks=3)
    >>> busy = DecodeCandidate("busy", num_requests=3, matched_blocks=3)
    >>> none = DecodeCandidate("none")
    >>> costs = prefix_aware([most, busy, none])
    >>> sorted(costs, key=costs.__getitem__)
    ['busy', 'most', 'none']
    """
    loads = least_request(candidates)
    least_block = 1.0 + max(loads.values())  # no load outweighs a block
    return {c.key: loads[c.key] / least_block - c.matched_blocks for c in candidates}
