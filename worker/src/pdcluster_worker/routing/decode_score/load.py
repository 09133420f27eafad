"""Policies that look at no prefix: `leastRequest` and `roundRobin`."""

from collections.abc import Sequence

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate

_HOP = 0.5
"""Cost of a hop to another worker, in requests: it decides between equals, and between equals
alone.
"""


def least_request(candidates: Sequence[DecodeCandidate]) -> dict[str, float]:
    """Cost: requests on the worker; this worker wins ties, which saves a hop.

    >>> least_request([DecodeCandidate("a", 2), DecodeCandidate("b", 2, is_self=True)])
    {'a': 2.5, 'b': 2.0}
    """
    return {c.key: c.num_requests + (0.0 if c.is_self else _HOP) for c in candidates}


def round_robin(candidates: Sequence[DecodeCandidate], last: str) -> dict[str, float]:
    """Cost: places from the worker after `last`, by name, round and round; `last` may have gone.

    >>> abc = [DecodeCandidate(key) for key in "cab"]
    >>> round_robin(abc, last=""), round_robin(abc, last="b")
    ({'a': 0.0, 'b': 1.0, 'c': 2.0}, {'c': 0.0, 'a': 1.0, 'b': 2.0})
    """
    keys = sorted(c.key for c in candidates)
    in_turn = [key for key in keys if key > last] + [key for key in keys if key <= last]
    return {key: float(place) for place, key in enumerate(in_turn)}
