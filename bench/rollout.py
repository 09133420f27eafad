"""Compare a roll out in the middle of each trace of examples/traces, by strategy.

    bench/rollout.py [TRACE...]

The 70B model of examples/traces/llm-70b.yaml with its autoscaler and budget, simulated as
`pdctl autoscale replay --rollout-at` does.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from layout import table

from pdcluster_api.traces.loads import drawn_requests, read_loads
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_simulator.cluster import cluster_model
from pdcluster_simulator.run import Options, Result, simulate
from pdctl.simulation.inputs import times_of_speeds
from pdctl.simulation.speeds import Speeds

TRACES = Path(__file__).parents[1] / "examples" / "traces"
NAMES = ("day-curve", "step-burst", "prompt-to-output-heavy")
STRATEGIES = ("Rolling", "BlueGreen", "Recreate", None)
INTERVAL, START_SECONDS = 5.0, 120.0


def cluster_of(strategy: str | None) -> PDCluster:
    document: dict[str, Any] = yaml.safe_load((TRACES / "llm-70b.yaml").read_text())
    if strategy is not None:
        document["spec"]["rollout"] = {"strategy": strategy}
    return parse(document)


def simulated(name: str, strategy: str | None) -> Result:
    cluster, loads = cluster_of(strategy), read_loads(TRACES / f"{name}.csv")
    trace = drawn_requests(loads, "0")
    model = cluster_model(cluster, times_of_speeds(cluster.spec, Speeds()), trace)
    middle = None if strategy is None else trace.seconds / 2
    options = Options(
        INTERVAL, autoscales=True, repeats=True, start_seconds=START_SECONDS, rollout_at=middle
    )
    return simulate(model, trace, options)


def row(name: str, strategy: str | None) -> list[str]:
    result = simulated(name, strategy)
    found, recorder = result.rollout, result.recorder
    ttft = sorted(each for each in recorder.ttft if each >= 0.0)
    cells = [name, strategy or "none"]
    if found is None:
        cells += ["-"] * 4
    else:
        cells.append("not ended" if found.seconds is None else f"{found.seconds:.0f}")
        cells.append(" ".join(f"{gpu} {n}" for gpu, n in sorted(found.most_accelerators.items())))
        cells.append(" ".join(f"{role} {n}" for role, n in found.least_ready.items()))
        cells.append(f"{found.out_of_band} of {found.intervals}")
    return [
        *cells,
        f"{ttft[len(ttft) // 2]:.2f}",
        f"{ttft[len(ttft) * 99 // 100]:.2f}",
        str(recorder.outcomes["complete"]),
        str(len(recorder.ttft) - recorder.outcomes["complete"]),
    ]


def main() -> None:
    header = ["trace", "strategy", "roll out, s", "most accelerators", "least ready"]
    header += ["out of band", "TTFT p50, s", "TTFT p99, s", "complete", "not"]
    names = sys.argv[1:] or NAMES
    rows = [row(name, strategy) for name in names for strategy in STRATEGIES]
    sys.stdout.write(table(header, rows) + "\n")


if __name__ == "__main__":
    main()
