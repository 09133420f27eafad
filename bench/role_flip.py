"""Compare flexible pools with pools that shrink and grow, on the traces of examples/traces.

    bench/role_flip.py [TRACE...]

The 70B model of examples/traces/llm-70b.yaml with B200 in both roles and a budget that is full,
simulated as `pdctl autoscale replay` does, once with `flexible: true` and once without. A role is
short in an interval in which its signals ask for more workers than serve it.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from layout import table

from pdcluster_api.traces.loads import drawn_requests, read_loads
from pdcluster_api.traces.requests import LoadTrace
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_simulator.cluster import cluster_model
from pdcluster_simulator.run import Options, Result, simulate
from pdctl.simulation.inputs import times_of_speeds
from pdctl.simulation.speeds import Speeds

TRACES = Path(__file__).parents[1] / "examples" / "traces"
ROLES, FLIPS = ("prefill", "decode"), ("flip", "flipBack")
INTERVAL, START_SECONDS = 5.0, 120.0


@dataclass(frozen=True)
class Setting:
    """Workers of each role at first, and accelerators of both."""

    prefill: int
    decode: int
    total: int


SETTINGS = {"prompt-to-output-heavy": Setting(7, 3, 10), "day-curve": Setting(3, 2, 12)}
PARTS = {"prompt-to-output-heavy": (3300.0, 8100.0), "day-curve": (7 * 3600.0, 12 * 3600.0)}
"""Seconds of the traces in which the load changes."""


def cluster_of(setting: Setting, *, is_flexible: bool) -> PDCluster:
    document: dict[str, Any] = yaml.safe_load((TRACES / "llm-70b.yaml").read_text())
    spec = document["spec"]
    for role, replicas in (("prefill", setting.prefill), ("decode", setting.decode)):
        pool = {"name": "b200", "gpu": "B200", "replicas": replicas, "minReplicas": 1}
        pool |= {"maxReplicas": setting.total, "flexible": is_flexible}
        spec["roles"][role] = {"pools": [pool]}
    spec["autoscale"]["budget"] = {"total": setting.total}
    return parse(document)


def trace_of(name: str) -> LoadTrace:
    begin, end = PARTS[name]
    loads = [
        replace(each, seconds=max(0.0, each.seconds - begin), end=each.end - begin)
        for each in read_loads(TRACES / f"{name}.csv")
        if each.end > begin and each.seconds < end
    ]
    return drawn_requests(loads, "0")


def simulated(name: str, *, is_flexible: bool) -> Result:
    cluster = cluster_of(SETTINGS[name], is_flexible=is_flexible)
    model = cluster_model(cluster, times_of_speeds(cluster.spec, Speeds()), trace_of(name))
    options = Options(INTERVAL, autoscales=True, repeats=True, start_seconds=START_SECONDS)
    return simulate(model, trace_of(name), options)


def short_seconds(result: Result, role: str) -> float:
    return INTERVAL * sum(role in each.over for each in result.decisions)


def row(name: str, *, is_flexible: bool) -> list[str]:
    result = simulated(name, is_flexible=is_flexible)
    ttft = sorted(each for each in result.recorder.ttft if each >= 0.0)
    records = [each.record for each in result.decisions if each.record is not None]
    steps = [step for record in records for step in record.steps if step.rule in FLIPS]
    changes = sum("/" in step.subject for step in steps) // 2
    return [
        name,
        "yes" if is_flexible else "no",
        *(f"{short_seconds(result, role):.0f}" for role in ROLES),
        f"{ttft[len(ttft) // 2]:.2f}",
        f"{ttft[len(ttft) * 99 // 100]:.2f}",
        str(changes),
        str(result.recorder.outcomes["complete"]),
        str(len(result.recorder.ttft) - result.recorder.outcomes["complete"]),
    ]


def main() -> None:
    header = ["trace", "flexible", *(f"{role} short, s" for role in ROLES), "TTFT p50, s"]
    header += ["TTFT p99, s", "changes of role", "complete", "not"]
    names = sys.argv[1:] or list(SETTINGS)
    rows = [row(name, is_flexible=each) for name in names for each in (True, False)]
    sys.stdout.write(table(header, rows) + "\n")


if __name__ == "__main__":
    main()
