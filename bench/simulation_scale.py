"""Time of a large simulation: `pdctl simulate` of many cells, a million requests.

    bench/simulation_scale.py [--cells 25] [--requests 1000000] [--processes 2] [--log]

Each cell has 20 prefill and 30 decode workers of 8 H200: 400 GPUs.  Step times are those of the
tables for Llama-3.1-70B FP8 with TP8; prompts of 2000 tokens, answers of 200, Poisson arrivals.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from setting import LOG_HELP, keep_report, setting_lines

MODEL = "Llama-3.1-70B-Instruct-FP8"
INPUT, OUTPUT = 2000, 200
RATE = 200.0  # of one cell, a second: about two thirds of its decode workers' steps


def document() -> dict[str, Any]:
    """One cell."""

    def pools(replicas: int) -> dict[str, Any]:
        return {"pools": [{"name": "h200", "gpu": "H200", "replicas": replicas}]}

    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "cell"},
        "spec": {
            "model": {"name": "llama-70b", "path": "/models/llama-70b"},
            "roles": {"prefill": pools(20), "decode": pools(30)},
            "engine": {"tensorParallelSize": 8},
            # The defaults are for one or two workers of each role.
            "routing": {"offload": {"prefillQueueMax": 2000, "decodeLoadThreshold": 1000}},
        },
    }


def run(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], float, float]:
    """(result, seconds, seconds of CPU)."""
    file, trace = folder / "cell.yaml", folder / "load.csv"
    file.write_text(yaml.safe_dump(document()))
    rate = RATE * options.cells
    half = options.requests / rate / 2
    load = f"{rate},{INPUT},{OUTPUT}"
    names = "seconds,requests_per_second,input_tokens,output_tokens"
    trace.write_text(f"{names}\n0,{load}\n{half},{load}\n")
    command = [
        *(sys.executable, "-m", "pdctl", "simulate", str(file), "--trace", str(trace), "--json"),
        *("--model", MODEL, "--cells", str(options.cells)),
        *("--processes", str(options.processes)),
    ]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(output), seconds, cpu


def table(result: dict[str, Any], seconds: float, cpu: float, options: argparse.Namespace) -> str:
    """The figures of the run, and of what it simulated."""
    found = result["summary"]
    simulated, number = found["seconds"], found["num_requests"]
    cells = (
        *(f"{result['accelerators']}", f"{number}", f"{simulated:.0f}"),
        *(f"{seconds:.0f}", f"{cpu:.0f}", f"{1e6 * cpu / number:.0f}"),
        *(f"{found['good_ratio']:.1%}", f"{found['ttft']['p90']:.3f}"),
        f"{1e3 * found['itl']['p90']:.1f}",
    )
    head = (
        "| GPUs | requests | simulated s | took s | CPU s | CPU µs a request | within objectives "
        "| TTFT p90 s | ITL p90 ms |\n|---|---|---|---|---|---|---|---|---|"
    )
    return f"{head}\n| {' | '.join(cells)} |\n\n{options.processes} processes"


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=25)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    lines = setting_lines("bench/simulation_scale.py", "", os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as folder:
        report = table(*run(options, Path(folder)), options)
    report = "\n".join([report, "", *lines])
    print(report)
    if options.log:
        keep_report(report)


if __name__ == "__main__":
    main()
