"""`prefixAware`: the worker that has most of the prompt in its prefix cache."""

from collections.abc import Sequence

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate
from pdcluster_worker.routing.decode_score.load import least_request


def prefix_aware(candidates: Sequence[DecodeCandidate]) -> dict[str, float]:
    """Minus the blocks matched; ties go to the fewest requests, then to this worker.

    >>> candidates = [DecodeCandidate("a"), DecodeCandidate("b", num_requests=9, matched_blocks=3)]
    >>> min(costs := prefix_aware(candidates), key=costs.__getitem__)
    'b'
    """
    loads = least_request(candidates)
    least_block = 1.0 + max(loads.values())  # no load outweighs a block
    return {c.key: loads[c.key] / least_block - c.matched_blocks for c in candidates}
