"""Figures out of Prometheus pages: differences, quantiles of a histogram, API calls by verb and kind.

Pure; `operator_scale` fetches the pages and says when.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, tuple[tuple[str, str], ...]]
_WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")


@dataclass(frozen=True)
class Samples:
    """Every sample of a page by name and labels; the difference of two pages holds what was counted between them."""

    values: Mapping[Key, float]

    @classmethod
    def parse(cls, page: str) -> Self:
        """Read a page in Prometheus' text format."""
        families = text_string_to_metric_families(page)
        return cls({(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples})

    def __sub__(self, other: Self) -> Self:
        return type(self)({key: value - other.values.get(key, 0.0) for key, value in self.values.items()})

    def value(self, name: str) -> float:
        """The sum over all labels; 0 for a name that is not there."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums by some labels."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for (found, pairs), value in self.values.items():
            if found == name:
                given = dict(pairs)
                sums[tuple(given.get(label, "") for label in labels)] += value
        return dict(sums)


@dataclass(frozen=True)
class Reading:
    """What operator and API server say of themselves at one time."""

    operator: Samples
    server: Samples


def histogram_quantile(samples: Samples, name: str, share: float) -> float:
    """Linear interpolation inside the bucket that holds the quantile, as PromQL does; nan for an empty histogram.

    >>> page = 'h_bucket{le="1.0"} 90\\nh_bucket{le="2.0"} 100\\nh_bucket{le="+Inf"} 100\\n'
    >>> histogram_quantile(Samples.parse('# TYPE h histogram\\n' + page + 'h_count 100\\nh_sum 1\\n'), 'h', 0.95)
    1.5
    """
    buckets = sorted((math.inf if le == "+Inf" else float(le), count) for (le,), count in samples.by(f"{name}_bucket", "le").items())
    if not buckets or buckets[-1][1] == 0:
        return math.nan
    rank, lower, below = share * buckets[-1][1], 0.0, 0.0
    for upper, count in buckets:
        if count >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    return lower


def operator_calls(samples: Samples) -> dict[tuple[str, str], float]:
    """The operator's own count of its API calls, by verb and kind."""
    counted = samples.by("pdcluster_operator_api_calls_total", "verb", "kind")
    return {(verb, kind): number for (verb, kind), number in counted.items() if number}


def server_writes(before: Reading, after: Reading) -> dict[str, float]:
    """Writes that the API server answered between two readings, by resource; of everybody, the bench's own included."""
    counted = (after.server - before.server).by("apiserver_request_total", "verb", "resource")
    sums: defaultdict[str, float] = defaultdict(float)
    for (verb, resource), number in counted.items():
        if verb in _WRITES and number:
            sums[resource] += number
    return dict(sums)


def calls_table(calls: Mapping[tuple[str, str], float], objects: int) -> Sequence[str]:
    """API calls as a Markdown table, with their number for each PDCluster."""
    rows = [f"| {verb} | {kind} | {number:.0f} | {number / objects:.2f} |" for (verb, kind), number in sorted(calls.items())]
    total = sum(calls.values())
    return [
        "| verb | kind | API calls | for each PDCluster |",
        "|---|---|---|---|",
        *rows,
        f"| all | | {total:.0f} | {total / objects:.2f} |",
    ]
