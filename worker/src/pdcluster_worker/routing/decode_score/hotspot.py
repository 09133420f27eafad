"""Prefix matches that count, and hotspot prevention: no prefix draws all requests to one worker."""

from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize


def with_enough_hits(
    candidates: Sequence[DecodeCandidate], request: RequestSize, min_ratio: float
) -> list[DecodeCandidate]:
    """Clear matches that are a smaller share of the prompt's blocks than `min_ratio`.

    >>> found = with_enough_hits([DecodeCandidate("a", matched_blocks=3), DecodeCandidate("b",
    ...     matched_blocks=2)], RequestSize(64, 16), 0.75)
    >>> [candidate.matched_blocks for candidate in found]
    [3, 0]
    """
    least = min_ratio * request.num_blocks
    # Copy only what changes: this runs for every request and worker.
    return [replace(c, matched_blocks=0) if 0 < c.matched_blocks < least else c for c in candidates]


def without_hot_prefix(
    candidates: Sequence[DecodeCandidate], hot_workers_ratio: float
) -> list[DecodeCandidate]:
    """Subtract the match that this share of the candidates (at least two) have in common."""
    num_hot = max(2, ceil(hot_workers_ratio * len(candidates)))
    if num_hot > len(candidates):
        return list(candidates)
    hot_blocks = sorted((c.matched_blocks for c in candidates), reverse=True)[num_hot - 1]
    if not hot_blocks:
        return list(candidates)
    # Copy only what changes: this runs for every request and worker.
    return [
        replace(c, matched_blocks=max(0, c.matched_blocks - hot_blocks)) if c.matched_blocks else c
        for c in candidates
    ]


def within_share(
    candidates: Sequence[DecodeCandidate], max_share_ratio: float
) -> list[DecodeCandidate]:
    """Candidates that may take one more request; never empty, since one is always below the mean.

    >>> [c.key for c in within_share([DecodeCandidate("a", 4), DecodeCandidate("b", 1),
    ...     DecodeCandidate("c", 0)], 1.5)]
    ['b', 'c']
    """
    most = ceil(max_share_ratio * (1 + sum(c.num_requests for c in candidates)) / len(candidates))
    return [c for c in candidates if c.num_requests + 1 <= most]
