"""A simulation beside real runs on this machine: TTFT and ITL of 1P1D, 2P2D and mixed at six loads.

    bench/simulated.py STEP_TIMES [--systems 1P1D,2P2D,mixed] [--rates 0.5,1,1.5,2,2.5,3]
    [--seconds 15] [--log]

STEP_TIMES: of `bench/step_times.py` on the same machine, with the same number of threads.
Each real cluster is started once; each load has prompts of 32 to 1024 tokens and answers of 32, and
the simulation gets the same lengths at the same times.  An error is simulated over measured, minus
1.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster import Setup, running_cluster
from offload_curve import LENGTHS, needs_ping
from setting import LOG_HELP, keep_report, setting_lines

from pdcluster_schema.load import load
from pdcluster_simulator.cluster import cluster_model
from pdcluster_simulator.results import summarize
from pdcluster_simulator.run import Options, simulate
from pdcluster_simulator.step_model import StepModel, read_step_model
from pdcluster_simulator.trace import ArrivalTrace, TraceRequest
from pdctl.bench.load import Arrivals, BenchRequest, percentile, poisson_arrivals, run_load

ROOT = Path(__file__).parents[1]
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
FILES = {"1P1D": "chat.yaml", "2P2D": "two-by-two.yaml", "mixed": "mixed.yaml"}
NAMES = ("TTFT mean", "TTFT p90", "ITL mean", "ITL p90")
OUTPUT = 32


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds, by `NAMES`."""

    system: str
    rate: float
    measured: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Relative errors, by `NAMES`."""
        pairs = zip(self.simulated, self.measured, strict=True)
        return [simulated / measured - 1.0 for simulated, measured in pairs]


def simulated(
    file: Path, times: StepModel, requests: Sequence[BenchRequest], arrivals: Sequence[float]
) -> tuple[float, ...]:
    """Milliseconds of a simulation of these requests."""
    cluster = load(file)
    trace = ArrivalTrace(
        [
            TraceRequest(at, len(request.prompt), request.num_output_tokens)
            for at, request in zip(arrivals, requests, strict=True)
        ]
    )
    roles = cluster.spec.roles.computing()
    by_pool = {(role, pool.name): times for role, each in roles.items() for pool in each.pools}
    model = cluster_model(cluster, by_pool, trace, is_first_ingress_alone=True)
    found = summarize(simulate(model, trace, Options(5.0)).recorder, 1e9, None)
    values = (found.ttft.mean, found.ttft.p90, found.itl.mean, found.itl.p90)
    return tuple(1e3 * (value or 0.0) for value in values)


def threaded(name: str, threads: int, folder: Path) -> Path:
    """The example with so many threads of each worker."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / FILES[name]).read_text())
    document["spec"]["engine"]["threads"] = threads
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


async def measured(
    name: str, times: StepModel, options: argparse.Namespace, folder: Path
) -> list[Row]:
    """The rows of one system."""
    file, rows = threaded(name, options.threads, folder), list[Row]()
    async with running_cluster(name, Setup(file, MODEL, {})) as cluster:
        warm = needs_ping(LENGTHS, 6, 4, "warm", name)
        await run_load(cluster.server, warm, Arrivals(max_concurrency=2))
        for rate in (float(each) for each in options.rates.split(",")):
            count = max(8, round(rate * options.seconds))
            requests = needs_ping(LENGTHS, count, OUTPUT, f"{rate}", name)
            arrivals = poisson_arrivals(rate, count, f"{rate}")
            found = (await run_load(cluster.server, requests, Arrivals(arrivals))).latencies_seconds
            real = (
                *(statistics.mean(found["ttft"]), percentile(found["ttft"], 90)),
                *(statistics.mean(found["itl"]), percentile(found["itl"], 90)),
            )
            milliseconds = tuple(1e3 * value for value in real)
            rows.append(Row(name, rate, milliseconds, simulated(file, times, requests, arrivals)))
            print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """One row of the table."""
    parts = zip(row.measured, row.simulated, row.errors, strict=True)
    cells = [f"{real:.0f} / {made:.0f} ({error:+.0%})" for real, made, error in parts]
    return f"| {row.system} | {row.rate:g} | {' | '.join(cells)} |"


def head() -> str:
    """The table's first lines."""
    names = " | ".join(f"{name}, ms" for name in NAMES)
    return f"| system | requests/s | {names} |\n|---|---|{'---|' * len(NAMES)}"


def medians(rows: Sequence[Row]) -> Mapping[str, float]:
    """Median absolute error of each name."""
    errors = zip(*(row.errors for row in rows), strict=True)
    return {
        name: statistics.median(abs(error) for error in each)
        for name, each in zip(NAMES, errors, strict=True)
    }


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step_times", type=Path)
    parser.add_argument("--systems", default="1P1D,2P2D,mixed")
    parser.add_argument("--rates", default="0.5,1,1.5,2,2.5,3")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    lines = setting_lines("bench/simulated.py", "", os.getloadavg()[0])
    times, rows = read_step_model(options.step_times), list[Row]()
    print(head(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.systems.split(","):
            rows += asyncio.run(measured(name, times, options, Path(folder)))
    errors = ", ".join(f"{name} {error:.0%}" for name, error in medians(rows).items())
    report = [
        f"Median absolute error over {len(rows)} loads: {errors}",
        "",
        "Measured / simulated (error):",
        "",
        head(),
        *map(line, rows),
        "",
        *lines,
    ]
    print("\n".join(report))
    if options.log:
        keep_report("\n".join(report))


if __name__ == "__main__":
    main()
