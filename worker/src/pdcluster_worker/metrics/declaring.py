"""Declares metrics as attributes of a class; an instance registers its own, under their names."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdcluster_worker.metrics.collectors import TokenHistogram

CollectorT = TypeVar("CollectorT")

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)


class _Declared:
    def __init__(self, make: Callable[[str, CollectorRegistry], Any]) -> None:
        self.make = make


def declared(make: Callable[[str, CollectorRegistry], CollectorT]) -> CollectorT:
    """A collector of each instance, which `make` registers; typed as what an instance has."""
    return cast(CollectorT, _Declared(make))


def register_declared(metrics: object, registry: CollectorRegistry) -> None:
    """Give an instance its own collectors, in the order of their declaration."""
    for name, value in vars(type(metrics)).items():
        if isinstance(value, _Declared):
            setattr(metrics, name, value.make(f"pdcluster_{name}", registry))


def gauge(text: str, *labels: str) -> Gauge:
    return declared(lambda name, registry: Gauge(name, text, labels, registry=registry))


def histogram(text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    return declared(
        lambda name, registry: Histogram(name, text, labels, registry=registry, buckets=buckets)
    )


def token_histogram(text: str) -> TokenHistogram:
    return declared(lambda name, registry: TokenHistogram(name, text, registry, SECONDS))


def counter(text: str, *labels: str, first: Iterable[str | tuple[str, ...]] = ()) -> Counter:
    """A counter, whose page adds `_total` to its name.

    first: values of its labels that are there from the start: the rate of a series that begins at
           1 misses what made it 1.
    """

    def make(name: str, registry: CollectorRegistry) -> Counter:
        made = Counter(name, text, labels, registry=registry)
        for values in first:
            made.labels(*((values,) if isinstance(values, str) else values))
        return made

    return declared(make)
