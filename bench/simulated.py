"""A simulation beside real runs on this machine: TTFT and ITL of 1P1D, 2P2D and mixed at six loads.

    bench/simulated.py STEP_TIMES [--systems 1P1D,2P2D,mixed] [--rates 0.5,1,1.5,2,2.5,3]
    [--seconds 15] [--fit FILE] [--log]

STEP_TIMES: of `bench/step_times.py` on the same machine, with the same number of threads.
Each real cluster is started once; each load has prompts of 32 to 1024 tokens and answers of 32, and
the simulation gets the same lengths at the same times.  An error is simulated over measured, minus
1.  `--fit` corrects the step times by every second load, for what a worker's own server, its
clients and other workers take from its engine, and prints the errors of the other loads too.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from cluster import Setup, running_cluster
from offload_curve import LENGTHS, needs_ping
from setting import LOG_HELP, keep_report, setting_lines

from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdcluster_schema.load import load
from pdcluster_simulator.cluster import cluster_model
from pdcluster_simulator.results import summarize
from pdcluster_simulator.run import Options, simulate
from pdcluster_simulator.step_model import StepModel, read_step_model, write_step_model
from pdctl.bench.load import Arrivals, BenchRequest, percentile, poisson_arrivals, run_load

ROOT = Path(__file__).parents[1]
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
FILES = {"1P1D": "chat.yaml", "2P2D": "two-by-two.yaml", "mixed": "mixed.yaml"}
NAMES = ("TTFT mean", "TTFT p90", "ITL mean", "ITL p90")
OUTPUT = 32


@dataclass(frozen=True, slots=True)
class Run:
    """A real run.  measured: milliseconds, by `NAMES`"""

    system: str
    rate: float
    file: Path
    requests: Sequence[BenchRequest]
    arrivals: Sequence[float]
    measured: tuple[float, ...]

    def errors(self, times: StepModel) -> list[float]:
        """Relative errors of a simulation with these step times, by `NAMES`."""
        pairs = zip(simulated(self, times), self.measured, strict=True)
        return [found / real - 1.0 for found, real in pairs]


def simulated(run: Run, times: StepModel) -> tuple[float, ...]:
    """Milliseconds of a simulation of a run's requests."""
    cluster = load(run.file)
    trace = LoadTrace(
        [
            TraceRequest(at, len(request.prompt), request.num_output_tokens)
            for at, request in zip(run.arrivals, run.requests, strict=True)
        ]
    )
    roles = cluster.spec.roles.computing()
    by_pool = {(role, pool.name): times for role, each in roles.items() for pool in each.pools}
    model = cluster_model(cluster, by_pool, trace, is_first_ingress_alone=True)
    found = summarize(simulate(model, trace, Options(5.0)).recorder, 1e9, None)
    values = (found.ttft.mean, found.ttft.p90, found.itl.mean, found.itl.p90)
    return tuple(1e3 * (value or 0.0) for value in values)


def median_errors(runs: Sequence[Run], times: StepModel) -> dict[str, float]:
    """Median absolute error of each name."""
    errors = zip(*(run.errors(times) for run in runs), strict=True)
    return {
        name: statistics.median(map(abs, each)) for name, each in zip(NAMES, errors, strict=True)
    }


CHOICES = {
    "steps": [round(0.9 + 0.05 * number, 2) for number in range(9)],
    "two": [1.0, 0.95, 0.9, 0.85, 0.8, 0.75],
    "more": [1.0, 0.85, 0.7, 0.6],
}


def corrected(times: StepModel, steps: float, two: float, more: float) -> StepModel:
    """steps: factor of a model's steps; two: speed of each of two engines; more: factor of the
    speed of three or four, to each of which two cores would give two thirds or a half
    """
    rates = (1.0, two, min(two, more * 2 / 3), min(two, more / 2))
    return msgspec.structs.replace(
        times,
        rows=tuple((number, steps * seconds) for number, seconds in times.rows),
        context_seconds=steps * times.context_seconds,
        pair_seconds=steps * times.pair_seconds,
        shared_rates=rates,
        source=f"{times.source}, corrected by bench/simulated.py --fit",
    )


def fitted(times: StepModel, runs: Sequence[Run]) -> dict[str, float]:
    """Choices with the least mean absolute error: one number after the other, twice."""
    found = {"steps": 1.0, "two": 1.0, "more": 1.0}
    for name in (*CHOICES, *CHOICES):

        def error(value: float, name: str = name) -> float:
            tried = corrected(times, **found | {name: value})
            return statistics.mean(abs(each) for run in runs for each in run.errors(tried))

        found[name] = min(CHOICES[name], key=error)
    return found


def threaded(name: str, threads: int, folder: Path) -> Path:
    """The example with so many threads of each worker."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / FILES[name]).read_text())
    document["spec"]["engine"]["threads"] = threads
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


async def measured(
    name: str, times: StepModel, options: argparse.Namespace, folder: Path
) -> list[Run]:
    """The runs of one system."""
    file, runs = threaded(name, options.threads, folder), list[Run]()
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
            runs.append(Run(name, rate, file, requests, arrivals, milliseconds))
            print(line(runs[-1], times), flush=True)
    return runs


def line(run: Run, times: StepModel) -> str:
    """One row of the table."""
    errors = run.errors(times)
    parts = zip(run.measured, errors, strict=True)
    cells = [f"{real:.0f} / {real * (1.0 + error):.0f} ({error:+.0%})" for real, error in parts]
    return f"| {run.system} | {run.rate:g} | {' | '.join(cells)} |"


def head() -> str:
    """The table's first lines."""
    names = " | ".join(f"{name}, ms" for name in NAMES)
    return f"| system | requests/s | {names} |\n|---|---|{'---|' * len(NAMES)}"


def table(runs: Sequence[Run], times: StepModel) -> list[str]:
    """Median errors, and a row for each run."""
    errors = ", ".join(f"{name} {error:.0%}" for name, error in median_errors(runs, times).items())
    rows = [line(run, times) for run in runs]
    return [f"Median absolute error over {len(runs)} loads: {errors}", "", head(), *rows, ""]


def fit_report(times: StepModel, runs: Sequence[Run], file: Path) -> list[str]:
    """Writes the corrected step times."""
    found = fitted(times, runs[::2])
    better = corrected(times, **found)
    write_step_model(better, file)
    texts = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return [
        f"Corrected by every second load: {texts}. Those loads:",
        *table(runs[::2], better),
        "The others, which had no part in it:",
        *table(runs[1::2], better),
    ]


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
    parser.add_argument("--fit", type=Path, metavar="FILE", help="write corrected step times")
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    lines = setting_lines("bench/simulated.py", "", os.getloadavg()[0])
    times, runs = read_step_model(options.step_times), list[Run]()
    print(head(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.systems.split(","):
            runs += asyncio.run(measured(name, times, options, Path(folder)))
        report = ["Measured / simulated (error):", *table(runs, times)]
        if options.fit is not None:
            report += fit_report(times, runs, options.fit)
    report += lines
    print("\n".join(report))
    if options.log:
        keep_report("\n".join(report))


if __name__ == "__main__":
    main()
