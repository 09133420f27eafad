"""Waiting before prefill, and how many streams decode at once: means and percentiles.

Tables of kernels give means of a step.  Queues add the rest, under Poisson arrivals:

- prompts wait as in M/G/n: with Erlang's C the probability that one waits, S the mean time of a
  prefill at n workers of utilization rho, and V its variance by S squared (0 for equal prompts), a
  wait is over t with probability C exp(-2 n (1 - rho) t / (S (1 + V))), so its mean is
  C S (1 + V) / (2 n (1 - rho)), exact for n = 1;
- the streams of a decode worker are Poisson around their mean.
"""

import math
from functools import cache
from statistics import NormalDist

MAX_UTILIZATION = 0.95
_STEPS = 30  # of a bisection: nine digits


def probability_of_wait(servers: int, utilization: float) -> float:
    """Erlang's C.

    >>> round(probability_of_wait(1, 0.6), 3), round(probability_of_wait(8, 0.6), 3)
    (0.6, 0.14)
    """
    load, blocked = servers * utilization, 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - utilization * (1.0 - blocked))


def wait_seconds(
    service_seconds: float,
    servers: int,
    utilization: float,
    percentile: float | None,
    variation: float = 0.0,
) -> float:
    """percentile: in per cent; None = the mean; variation: V.

    >>> round(wait_seconds(1.0, 1, 0.5, None), 3), round(wait_seconds(1.0, 1, 0.5, 90.0), 3)
    (0.5, 1.609)
    """
    waits = probability_of_wait(servers, utilization)
    scale = service_seconds * (1.0 + variation) / (2.0 * servers * (1.0 - utilization))
    if percentile is None:
        return waits * scale
    share = 1.0 - percentile / 100.0
    return scale * math.log(waits / share) if waits > share else 0.0


@cache
def max_utilization(
    service_seconds: float,
    servers: int,
    limit_seconds: float,
    percentile: float | None,
    variation: float = 0.0,
) -> float:
    """Greatest utilization whose wait is within the limit; 0 = none."""
    if limit_seconds < 0.0:
        return 0.0
    low, high = 0.0, MAX_UTILIZATION
    if wait_seconds(service_seconds, servers, high, percentile, variation) <= limit_seconds:
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        if wait_seconds(service_seconds, servers, middle, percentile, variation) <= limit_seconds:
            low = middle
        else:
            high = middle
    return low


def streams_at(mean: float, percentile: float | None) -> float:
    """Streams that a worker decodes at once: of a Poisson distribution, by its normal one.

    >>> streams_at(64.0, None), round(streams_at(64.0, 90.0), 1)
    (64.0, 74.3)
    """
    if percentile is None:
        return mean
    return max(mean, mean + NormalDist().inv_cdf(percentile / 100.0) * math.sqrt(mean))
