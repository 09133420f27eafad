"""Latencies as buckets, which add up over workers and scrapes where percentiles do not."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf


@dataclass(frozen=True)
class LatencyHistogram:
    """Observations of some time, as Prometheus counts them.

    bounds:  upper bounds of the buckets in seconds, ascending; the last is infinite
    counts:  observations of at most each bound, so the last counts all
    seconds: sum of all observations
    """

    bounds: tuple[float, ...] = (inf,)
    counts: tuple[float, ...] = (0.0,)
    seconds: float = 0.0

    @classmethod
    def of(
        cls, bounds: tuple[float, ...], observations: Iterable[tuple[float, float]]
    ) -> "LatencyHistogram":
        """bounds: without the infinite one; observations: (number, seconds of each)"""
        counts, total = [0.0] * (len(bounds) + 1), 0.0
        for number, seconds in observations:
            counts[bisect_left(bounds, seconds)] += number
            total += number * seconds
        return cls((*bounds, inf), tuple(accumulate(counts)), total)

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "LatencyHistogram":
        """bounds: with the infinite one"""
        return cls(bounds, (0.0,) * len(bounds))

    @property
    def count(self) -> float:
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count > 0.0 else None

    def percentile(self, percentile: float) -> float | None:
        """Linear between the bounds of a bucket, whose first begins at 0, as `histogram_quantile`
        of Prometheus; of the infinite bucket its lower bound.  None = nothing was observed, or
        there is no other bucket.

        >>> LatencyHistogram((0.1, 0.5, inf), (50.0, 90.0, 100.0)).percentile(90)
        0.5
        """
        if self.count <= 0.0 or len(self.bounds) == 1:
            return None
        rank = percentile / 100.0 * self.count or self.count  # the least float has no half
        # rounding may lift the rank of the last observation above the count
        at = min(bisect_left(self.counts, rank), len(self.counts) - 1)
        low = self.bounds[at - 1] if at else 0.0
        if self.bounds[at] == inf:
            return low
        below = self.counts[at - 1] if at else 0.0
        return low + (self.bounds[at] - low) * (rank - below) / (self.counts[at] - below)

    def since(self, before: "LatencyHistogram") -> "LatencyHistogram | None":
        """Return what came after `before`; None = a counter went back, or the buckets differ."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=False))
        seconds = self.seconds - before.seconds
        if self.bounds != before.bounds or seconds < 0.0 or not is_ascending((0.0, *counts)):
            return None
        return LatencyHistogram(self.bounds, counts, seconds)

    @cached_property
    def at_most(self) -> dict[float, float]:
        """Counts by bound."""
        return dict(zip(self.bounds, self.counts, strict=True))


def is_ascending(numbers: tuple[float, ...]) -> bool:
    return all(one <= other for one, other in pairwise(numbers))


def merged(histograms: Iterable[LatencyHistogram]) -> LatencyHistogram:
    """All together, by the bounds that all have: exact there, whatever buckets each had.

    >>> coarse = LatencyHistogram((0.5, inf), (1.0, 3.0), 4.0)
    >>> merged([LatencyHistogram((0.1, 0.5, inf), (5.0, 6.0, 6.0), 1.0), coarse])
    LatencyHistogram(bounds=(0.5, inf), counts=(7.0, 9.0), seconds=5.0)
    """
    every = [each for each in histograms if each.count > 0.0]
    if not every:
        return LatencyHistogram()
    shared = set(every[0].bounds).intersection(*(each.bounds for each in every[1:]))
    bounds = tuple(sorted(shared))
    counts = tuple(sum(each.at_most[bound] for each in every) for bound in bounds)
    return LatencyHistogram(bounds, counts, sum(each.seconds for each in every))
