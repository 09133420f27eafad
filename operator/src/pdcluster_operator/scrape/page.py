"""One worker's `/metrics` page to the numbers that autoscaling needs (docs/contracts.md). A parser
of our own: nearly all lines are buckets, skipped by name. One wrong line refuses the page.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Annotated, Literal, get_type_hints

from pdcluster_api.errors import OperatorError

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

    Ratios are 0 to 1.  Counters (`_total`, and the count and sum of a histogram at the ingress)
    grow from the worker's start.  A field without a default has to be on every page, so a metric
    that older workers do not have is optional.
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
    time_to_first_token_seconds_sum: Annotated[float, _COUNTED]
    time_per_output_token_seconds_count: Annotated[float, _COUNTED]
    time_per_output_token_seconds_sum: Annotated[float, _COUNTED]
    # mean of the worker's GPUs; None = it has none, or their driver does not say
    gpu_utilization_ratio: Annotated[float | None, _RATIO] = None
    # the worker's start in Unix seconds; None = it does not report it
    prompt_tokens_created: Annotated[float | None, _Metric(1e11, "start")] = None
    at: float = 0.0  # when it was read, in seconds of a clock that never jumps


# By the field of MetricsPage: the metric's name without its prefix
METRICS: Mapping[str, _Metric] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(MetricsPage, include_extras=True).items()
    if name != "at"
}
_REQUIRED = [field.name for field in fields(MetricsPage) if field.default is MISSING]
_PREFIX = "pdcluster_"
_KNOWN = {f"{_PREFIX}{name}".encode(): (name, metric.most) for name, metric in METRICS.items()}


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
    metric_of = _KNOWN.get
    for line in body.split(b"\n"):
        name, _, text = line.partition(b" ")
        metric = metric_of(name)
        if metric is None:
            continue
        field, most = metric
        if field in numbers:
            raise PageError(f"{name.decode()} stands there twice")
        numbers[field] = _number(name.decode(), text, most)
    missing = [f"{_PREFIX}{name}" for name in _REQUIRED if name not in numbers]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PageError(f"it lacks {missing[0]}{others}")
    return MetricsPage(**numbers)


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
