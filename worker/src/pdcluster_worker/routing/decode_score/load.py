"""Policies without weights: `leastRequest`, `roundRobin` and `prefixAware`."""

from collections.abc import Sequence

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate

_HOP = 0.5  # cost of a hop to another worker, in requests: breaks ties only


def least_request(candidates: Sequence[DecodeCandidate]) -> dict[str, float]:
    """Requests on the worker; this worker wins ties, which saves a hop.

    >>> least_request([DecodeCandidate("a", 2), DecodeCandidate("b", 2, is_self=True)])
    {'a': 2.5, 'b': 2.0}
    """
    return {c.key: c.num_requests + (0.0 if c.is_self else _HOP) for c in candidates}


def round_robin(candidates: Sequence[DecodeCandidate], last: str) -> dict[str, float]:
    """Position after `last` in the order of keys; `last` may be gone.

    >>> abc = [DecodeCandidate(key) for key in "cab"]
    >>> round_robin(abc, last=""), round_robin(abc, last="b")
    ({'a': 0.0, 'b': 1.0, 'c': 2.0}, {'c': 0.0, 'a': 1.0, 'b': 2.0})
    """
    keys = sorted(c.key for c in candidates)
    in_turn = [key for key in keys if key > last] + [key for key in keys if key <= last]
    return {key: float(place) for place, key in enumerate(in_turn)}


def prefix_aware(candidates: Sequence[DecodeCandidate]) -> dict[str, float]:
    """Minus the blocks matched; ties go to the fewest requests, then to this worker.

    >>> candidates = [DecodeCandidate("a"), DecodeCandidate("b", num_requests=9, matched_blocks=3)]
    >>> min(costs := prefix_aware(candidates), key=costs.__getitem__)
    'b'
    """
    loads = least_request(candidates)
    least_block = 1.0 + max(loads.values())  # no load outweighs a block
    return {c.key: loads[c.key] / least_block - c.matched_blocks for c in candidates}
