"""Targets of scrapes and their results: plain values."""

from dataclasses import dataclass
from enum import StrEnum

from pdcluster_operator.scrape.page import MetricsPage

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
    """Result of one scrape."""

    target: ScrapeTarget
    at: float  # when it ended, in seconds of a clock that never jumps
    seconds: float  # how long it took, without the wait for a slot
    result: MetricsPage | Miss
