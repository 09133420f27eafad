"""One worker's `/metrics` page to the numbers that autoscaling needs (docs/contracts.md). A parser
of our own: nearly all lines are skipped by name. One wrong line refuses the page.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from math import inf
from typing import Annotated, Literal, get_type_hints

from pdcluster_api.errors import OperatorError
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, is_ascending

_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SHOWN_BYTES = 40


@dataclass(frozen=True)
class _Metric:
    """most: that is believed"""

    most: float
    kind: Literal["gauge", "counter", "start"] = "gauge"


_REQUESTS, _TOKENS, _RATIO = _Metric(1e9), _Metric(1e12), _Metric(1.0)
# beyond 2**53 a float no longer counts by one, so differences of a counter would be lost
_COUNTED, _SECONDS = _Metric(2.0**53, "counter"), _Metric(1e11, "counter")


class PageError(OperatorError):
    """A page that is not believed; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The wanted numbers of one page.

    Ratios are 0 to 1.  Counters (`_total`, the count of a histogram at the ingress, and the
    histograms) grow from the worker's start.  A field without a default has to be on every page, so
    a metric that older workers do not have is optional.
    """

    num_requests_running: Annotated[float, _REQUESTS]
    num_requests_waiting: Annotated[float, _REQUESTS]
    prefill_queue_requests: Annotated[float, _REQUESTS]
    prefill_queue_tokens: Annotated[float, _TOKENS]
    kv_cache_usage_ratio: Annotated[float, _RATIO]
    engine_busy_ratio: Annotated[float, _RATIO]
    prompt_tokens_total: Annotated[float, _COUNTED]
    prefill_tokens_total: Annotated[float, _COUNTED]
    prefill_seconds_total: Annotated[float, _SECONDS]
    generation_tokens_total: Annotated[float, _COUNTED]
    time_to_first_token_seconds_count: Annotated[float, _COUNTED]
    # mean of the worker's GPUs; None = it has none, or their driver does not say
    gpu_utilization_ratio: Annotated[float | None, _RATIO] = None
    # of a router; None = it does not say
    held_requests: Annotated[float | None, _REQUESTS] = None
    # the worker's start in Unix seconds; None = it does not report it
    prompt_tokens_created: Annotated[float | None, _Metric(1e11, "start")] = None
    at: float = 0.0  # when it was read, in seconds of a clock that never jumps
    # of latencies at the ingress, by the names of `HISTOGRAMS`
    histograms: Mapping[str, LatencyHistogram] = field(default_factory=dict)


# By the field of MetricsPage: the metric's name without its prefix
METRICS: Mapping[str, _Metric] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(MetricsPage, include_extras=True).items()
    if name not in ("at", "histograms")
}
_REQUIRED = [
    each.name for each in fields(MetricsPage) if each.name in METRICS and each.default is MISSING
]
_PREFIX = "pdcluster_"
_KNOWN = {f"{_PREFIX}{name}".encode(): (name, metric.most) for name, metric in METRICS.items()}

# By the field of an objective: the histogram that it is judged by, and its phase
HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "ttft": ("time_to_first_token_seconds", ""),
    "itl": ("inter_token_latency_seconds", ""),
    "queue": ("ttft_phase_seconds", "queue"),
}
_FAMILIES = {(name.encode(), phase.encode()): key for key, (name, phase) in HISTOGRAMS.items()}
_NAMES = "|".join(name for name, _ in HISTOGRAMS.values())
_BUCKET = re.compile(rf"{_PREFIX}({_NAMES})_(bucket|sum)(?:{{(.*)}})?".encode())
_LABEL = re.compile(rb'(?:^|,)(le|phase)="([^"]*)"')
_MAX_BUCKETS = 100


def parse_page(body: bytes) -> MetricsPage:
    """The numbers of a page in Prometheus' text format.  Raises PageError for a page that ends in
    the middle of a line or lacks a metric, and for a wanted one that stands there twice, is no
    plain number (NaN and infinity included), is negative, or is larger than a worker can mean.
    """
    if not body.endswith(b"\n"):
        raise PageError(
            f"it ends in the middle of a line, after {len(body)} bytes: {body[-_SHOWN_BYTES:]!r}"
        )
    numbers: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {key: {} for key in HISTOGRAMS}
    metric_of = _KNOWN.get
    for line in body.split(b"\n"):
        name, _, text = line.partition(b" ")
        metric = metric_of(name)
        if metric is None:
            if (found := _BUCKET.fullmatch(name)) is not None:
                _add_bucket(buckets, found, text)
            continue
        key, most = metric
        if key in numbers:
            raise PageError(f"{name.decode()} stands there twice")
        numbers[key] = _number(name.decode(), text, most)
    missing = [f"{_PREFIX}{name}" for name in _REQUIRED if name not in numbers]
    missing += [
        f"{_PREFIX}{name}_bucket"
        for key, (name, phase) in HISTOGRAMS.items()
        if not (phase or buckets[key])  # a phase is there from its first observation on
    ]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PageError(f"it lacks {missing[0]}{others}")
    histograms = {key: _histogram(key, found) for key, found in buckets.items() if found}
    return MetricsPage(**numbers, histograms=histograms)


_SUM = -1.0  # in place of a bound, which is none


def _add_bucket(
    buckets: dict[str, dict[float, float]], found: re.Match[bytes], text: bytes
) -> None:
    labels = dict(_LABEL.findall(found[3] or b""))
    key = _FAMILIES.get((found[1], labels.get(b"phase", b"")))
    if key is None:
        return
    name, bound = found[0].decode(errors="replace"), _SUM
    if found[2] == b"bucket":
        text_of = labels.get(b"le", b"")
        bound = inf if text_of == b"+Inf" else _number(f"le of {name}", text_of, _SECONDS.most)
    if bound in buckets[key]:
        raise PageError(f"{name} stands there twice")
    if len(buckets[key]) > _MAX_BUCKETS:
        raise PageError(f"{name} has more than {_MAX_BUCKETS} buckets")
    buckets[key][bound] = _number(name, text, _COUNTED.most)


def _histogram(key: str, found: dict[float, float]) -> LatencyHistogram:
    name = f"{_PREFIX}{HISTOGRAMS[key][0]}"
    seconds = found.pop(_SUM, None)
    if seconds is None or inf not in found:
        raise PageError(f"{name} lacks its {'sum' if seconds is None else 'bucket +Inf'}")
    bounds = tuple(sorted(found))
    counts = tuple(found[bound] for bound in bounds)
    if not is_ascending(counts):
        raise PageError(f"{name} counts fewer observations in a bucket than in the one below it")
    return LatencyHistogram(bounds, counts, seconds)


def _number(name: str, text: bytes, most: float) -> float:
    if not _NUMBER.fullmatch(text):
        raise PageError(f"{name} is no number: {text[:_SHOWN_BYTES]!r}")
    number = float(text)
    if number < 0:
        raise PageError(f"{name} is negative: {number:g}")
    if number > most:
        raise PageError(f"{name} is {number:g}, more than can be meant (at most {most:g})")
    return number


ClusterKey = tuple[str, str]  # (namespace, name) of a PDCluster


@dataclass(frozen=True)
class ScrapeTarget:
    """One ready worker.  address: `host:port` of its HTTP listener; an IPv6 host is in brackets."""

    cluster: ClusterKey
    role: str
    pool: str
    pod: str
    address: str
    workload: str = ""  # its name; empty = not known


class Reason(StrEnum):
    """Reason why a scrape gave no numbers; the label of a metric."""

    ADDRESS = "address"
    CONNECT = "connect"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    STATUS = "status"
    TOO_LARGE = "too_large"
    BAD_PAGE = "bad_page"


@dataclass(frozen=True)
class Miss:
    """A scrape that gave no numbers.  message: without the worker's name."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ScrapeResult:
    target: ScrapeTarget
    at: float  # when it ended, in seconds of a clock that never jumps
    seconds: float  # how long it took, without the wait for a slot
    result: MetricsPage | Miss
