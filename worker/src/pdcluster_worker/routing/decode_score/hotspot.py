"""Hotspot prevention: what keeps one prefix from drawing all its requests to one worker.

Two rules for the policies that prefixes attract.  Leading blocks that most
workers have attract no more: they are cached nearly everywhere, so load decides,
and only what is cached beyond them counts.  And no worker takes more than a
bounded share: one whose requests would pass `max_share_ratio` times the mean is
out of the choice while another is below.
"""

from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate


def without_hot_prefix(
    candidates: Sequence[DecodeCandidate], hot_workers_ratio: float
) -> list[DecodeCandidate]:
    """Candidates without the match that at least this share of them have, of two at least.

    >>> four = [DecodeCandidate(key, matched_blocks=n) for key, n in (("a", 10), ("b", 10), ("c",
    ...     50), ("d", 0))]
    >>> [c.matched_blocks for c in without_hot_prefix(four, 0.75)]
    [0, 0, 40, 0]
    """
    num_hot = max(2, ceil(hot_workers_ratio * len(candidates)))
    if num_hot > len(candidates):
        return list(candidates)
    hot_blocks = sorted((c.matched_blocks for c in candidates), reverse=True)[num_hot - 1]
    if not hot_blocks:
        return list(candidates)
    # Copied only where it differs: this is on the way of every request, over all workers.
    return [
        replace(c, matched_blocks=max(0, c.matched_blocks - hot_blocks)) if c.matched_blocks else c
        for c in candidates
    ]


def within_share(
    candidates: Sequence[DecodeCandidate], max_share_ratio: float
) -> list[DecodeCandidate]:
    """Candidates that may take one more request: at most max_share_ratio times the mean of all,
    itself counted, rounded up.

    Never empty: the one with the fewest requests is always below the mean.

    >>> [c.key for c in within_share([DecodeCandidate("a", 4), DecodeCandidate("b", 1),
    ...     DecodeCandidate("c", 0)], 1.5)]
    ['b', 'c']
    >>> [c.key for c in within_share([DecodeCandidate("a", 1), DecodeCandidate("b", 0)], 1.5)]
    ['a', 'b']
    """
    most = ceil(max_share_ratio * (1 + sum(c.num_requests for c in candidates)) / len(candidates))
    return [c for c in candidates if c.num_requests + 1 <= most]
