"""Least share of a prompt that must be cached before a prefix match counts."""

from collections.abc import Sequence

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
    # Copied only where it differs: this is on the way of every request, over all workers.
    return [replace(c, matched_blocks=0) if 0 < c.matched_blocks < least else c for c in candidates]
