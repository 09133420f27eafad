"""Buckets of the workers' histograms of latencies."""

from typing import Final

LATENCY_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Upper bounds in seconds, without the infinite one."""
