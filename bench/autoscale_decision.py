"""CPU time of the autoscaler's decisions: many clusters of two roles with two pools each, one
decision for every cluster.

    bench/autoscale_decision.py [--clusters 100] [--workers 64] [--times 5]

Windows hold a minute of scrapes, memories five minutes of recommendations, and the
clusters differ: a third rest, a third grow with both roles, a third shrink; all
have a ratio band, a budget and prices.  Exits 1 when the slowest time over all
clusters takes LIMIT seconds of CPU or more.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import (
    Clock,
    Holding,
    Memory,
    Outcome,
    PoolFacts,
    PoolSample,
    Windows,
    WorkerSample,
)
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec

LIMIT = 1.0
NOW = 100_000.0
ROUNDS = 12
INTERVAL_SECONDS = 5.0
WALL = datetime(2026, 3, 4, 12, tzinfo=UTC)
POOLS = (
    ("prefill", "b200", "B200"),
    ("prefill", "h100", "H100"),
    ("decode", "b300", "B300"),
    ("decode", "h200", "H200"),
)
LOADS = (0.6, 0.95, 0.1)  # shares: at rest, grows, shrinks


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `decide`."""

    spec: PDClusterSpec
    facts: Sequence[PoolFacts]
    windows: Windows
    memory: Memory

    def decide(self) -> Outcome:
        return decide(self.spec, self.facts, self.windows, self.memory, Clock(NOW, WALL))


@dataclass(frozen=True)
class Figures:
    """cpu_seconds: of all clusters together, one for each time; num_changed: clusters whose sizes
    changed.
    """

    clusters: int
    workers: int
    cpu_seconds: Sequence[float]
    num_changed: int

    def __str__(self) -> str:
        return (
            f"{self.clusters} clusters of {len(POOLS)} pools of {self.workers} workers, one "
            "decision each: "
            f"CPU {min(self.cpu_seconds):.3f} to {max(self.cpu_seconds):.3f} s in "
            f"{len(self.cpu_seconds)} times (limit {LIMIT:g} s), "
            f"{max(self.cpu_seconds) / self.clusters * 1000:.2f} ms for each cluster at most; "
            f"{self.num_changed} clusters change; load average {os.getloadavg()[0]:.1f}"
        )


def spec_of(workers: int) -> PDClusterSpec:
    roles: dict[str, dict[str, list[dict[str, object]]]] = {}
    for role, name, gpu in POOLS:
        declared = {
            "name": name,
            "gpu": gpu,
            "replicas": workers,
            "minReplicas": 1,
            "maxReplicas": 2 * workers,
        }
        roles.setdefault(role, {"pools": []})["pools"].append(declared)
    autoscale = {
        "mode": "On",
        "ratio": {"min": 0.5, "max": 1.2},
        "budget": {"total": 5 * workers, "perGpu": {"B200": 2 * workers}},
        "cost": {"B200": 3.0, "B300": 4.0},
        "prefill": {"ttftSeconds": 0.5, "backlogUpSeconds": 2.0, "headroom": 0.1},
        "decode": {"tpotSeconds": 0.05},
    }
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": roles,
        "autoscale": autoscale,
    }
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "bench"},
            "spec": spec,
        }
    ).spec


def window(role: str, name: str, workers: int, share: float) -> list[PoolSample]:
    like = WorkerSample(
        "",
        3,
        0,
        0.02 * share,
        20 * share,
        share,
        share,
        None,
        1.0,
        900.0,
        800.0,
        0.5,
        300.0,
        0.3,
        0.03,
    )
    found = tuple(replace(like, pod=f"{role}-{name}-{ordinal}") for ordinal in range(workers))
    return [PoolSample(NOW - INTERVAL_SECONDS * back, found) for back in reversed(range(ROUNDS))]


def case(spec: PDClusterSpec, workers: int, share: float) -> Case:
    holdings = (Holding(workers, workers, tuple(range(workers)), grows=True),)
    facts = [
        PoolFacts(role, name, gpu, workers, workers, workers, holdings=holdings)
        for role, name, gpu in POOLS
    ]
    windows = {(role, name): window(role, name, workers, share) for role, name, _ in POOLS}
    recommendations = tuple(
        (NOW - 5.0 * back, 2 * workers - 1 - back % 2) for back in reversed(range(1, 61))
    )
    roles = ("prefill", "decode")
    return Case(
        spec,
        facts,
        windows,
        Memory(
            dict.fromkeys(roles, recommendations),
            dict.fromkeys(roles, 2 * workers),
            at=NOW - INTERVAL_SECONDS,
        ),
    )


def run(clusters: int, workers: int, times: int) -> Figures:
    """Measure; windows are made before the clock runs."""
    cases = [
        case(spec_of(workers), workers, LOADS[number % len(LOADS)]) for number in range(clusters)
    ]
    seconds = []
    for _ in range(times):
        start = time.process_time()
        outcomes = [each.decide() for each in cases]
        seconds.append(time.process_time() - start)
    return Figures(clusters, workers, seconds, sum(each.changed for each in outcomes))


def main(arguments: Sequence[str]) -> int:
    """Print the figures; 1 when the limit is reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=100)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args(arguments)
    found = run(given.clusters, given.workers, given.times)
    print(found)
    return 0 if max(found.cpu_seconds) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
