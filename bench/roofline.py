"""The engine's steps beside what the machine can do: `mixed` under loads that make steps of one
kind.

    bench/roofline.py [--set FIELD=VALUE ...] [--log]

Measures memory bandwidth and matmul peak of this machine with one thread and
with all, then starts our mixed worker and reads the time of its steps from its
own metrics (`pdcluster_engine_step_seconds`), so nothing of the engine's inside
is known here.  It takes one to three minutes, and wants the machine to
itself.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cluster import Cluster, Setup, running_cluster
from footprint import others_cpu_seconds
from layout import table
from roofline_figures import BYTES, Machine, Reached, Shape, Step, reached
from run import FILES, engine_fields
from setting import LOG_HELP, keep_report, setting_lines

from pdcluster_api.errors import OperatorError, StartError
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load
from pdctl.bench.datasets import DatasetSampling, Lengths, random_requests
from pdctl.bench.load import Arrivals, run_load
from pdctl.bench.measure import require_complete
from pdctl.local.machine import available_cores
from pdctl.local.model import cached_model

CHUNK = 256
READ_SHAPE = (8192, 16_384)  # half a GB of float32: larger than any cache of a processor
MATMUL_ROWS = 2048
REPEATS = 5
GOAL = 0.7
"""Goal as a share of the measured bandwidth, at a decode step of 16."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A load whose steps of one kind are all alike.

    kind:  the label of the step metric
    step:  what each of them computes, at a mean context
    """

    name: str
    kind: str
    num_requests: int
    lengths: Lengths
    step: Step


def phases(budget: int) -> list[Phase]:
    """Prompts of a decode phase fit into one step together, so that all sequences decode side by
    side from then on.
    """
    prompt = 8
    made = {1: 128, 16: 480}  # of 16: a mean context near that of workload A
    decodes = [
        Phase(
            f"decode step of {count}",
            "decode",
            count,
            Lengths(prompt, num_output),
            Step.decode(count, prompt + num_output / 2),
        )
        for count, num_output in made.items()
    ]
    chunk = min(CHUNK, budget)
    count = 4
    mean_before = chunk * (count - 1) / 2
    # The last of its chunks samples, so reads the head once: left out.
    prefill = Phase(
        f"prefill chunk of {chunk}",
        "prefill",
        1,
        Lengths(chunk * count, 1),
        Step.chunk(chunk, mean_before),
    )
    return [*decodes, prefill]


def bandwidth(num_threads: int) -> float:
    """Bytes a second that a pass over a large array reads: the best of the product of a matrix with
    a vector and of sums of its rows, several times.

    Which of the two is faster depends on the processor: torch's product reads 0.7x of what its sum
    does on a Zen 4.  In float32, in which every processor computes as fast as it reads.
    """
    torch.set_num_threads(num_threads)
    matrix, vector = torch.ones(READ_SHAPE), torch.ones(READ_SHAPE[1])
    reads = (lambda: matrix @ vector, lambda: matrix.sum(1))
    return matrix.nbytes / min(_best_seconds(read) for read in reads)


def matmul_peak(num_threads: int, dtype: torch.dtype) -> float:
    """Operations a second of a large product, the best of several."""
    torch.set_num_threads(num_threads)
    left, right = (torch.ones(MATMUL_ROWS, MATMUL_ROWS, dtype=dtype) for _ in range(2))
    return 2 * MATMUL_ROWS**3 / _best_seconds(lambda: left @ right)


def peaks(num_threads: int) -> dict[str, float]:
    """Operations a second by dtype, of those that the processor multiplies by itself.

    One that has no products of bfloat16 computes them in float32, at no more than that peak.
    """
    dtypes = {"float32": torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes["bfloat16"] = torch.bfloat16
    return {name: matmul_peak(num_threads, dtype) for name, dtype in dtypes.items()}


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


async def step_seconds(cluster: Cluster, phase: Phase, vocab_size: int) -> float:
    """Mean time of the phase's steps, by the engine's own account.

    Raises StartError when it made none.
    """
    needs_ping = random_requests(
        phase.num_requests, phase.lengths, vocab_size, phase.name, DatasetSampling()
    )
    await _load(cluster, phase, vocab_size, "warm-up")
    before = await cluster.steps(phase.kind)
    require_complete(await run_load(cluster, needs_ping, Arrivals()))
    after = await cluster.steps(phase.kind)
    count, seconds = after[0] - before[0], after[1] - before[1]
    if not count:
        raise StartError(
            f"{phase.name}: the engine made no step of the kind {phase.kind}", exit_code=1
        )
    return seconds / count


async def _load(cluster: Cluster, phase: Phase, vocab_size: int, seed: str) -> None:
    lengths = Lengths(phase.lengths.input_len, min(4, phase.lengths.output_len))
    needs_ping = random_requests(
        phase.num_requests, lengths, vocab_size, seed + phase.name, DatasetSampling()
    )
    require_complete(await run_load(cluster, needs_ping, Arrivals()))


async def measure(setup: Setup, vocab_size: int) -> tuple[str, list[tuple[Phase, float]]]:
    """The engine's dtype, and the mean step of each phase."""
    budget = int(
        setup.engine.get("maxBatchedTokens", load(setup.file).spec.engine.max_batched_tokens)
    )
    async with running_cluster("mixed", setup) as cluster:
        found = [
            (phase, await step_seconds(cluster, phase, vocab_size)) for phase in phases(budget)
        ]
        return await cluster.dtype(), found


def machine_table(rows: Mapping[int, Mapping[str, float]]) -> str:
    """By threads: figures by name."""
    names = list(next(iter(rows.values())))
    return table(
        ["threads", *names],
        [[str(n), *(f"{row[name]:.3g}" for name in names)] for n, row in rows.items()],
    )


def phase_table(rows: Sequence[tuple[str, Reached]]) -> str:
    """A row for each phase."""
    header = [
        "",
        "MB",
        "GFLOP",
        "floor ms",
        "bound",
        "measured ms",
        "of the roofline",
        "of the bandwidth",
        "of the peak",
    ]
    return table(
        header,
        [
            [
                name,
                f"{one.bytes_moved / 1e6:.0f}",
                f"{one.flops / 1e9:.1f}",
                f"{1e3 * one.floor_seconds:.1f}",
                one.bound,
                f"{1e3 * one.seconds:.1f}",
                *(
                    f"{100 * share:.0f} %"
                    for share in (one.floor_ratio, one.bandwidth_ratio, one.peak_ratio)
                ),
            ]
            for name, one in rows
        ],
    )


def report(load_average: float, setup: Setup) -> str:
    """Measure everything, and write it down."""
    others, start = others_cpu_seconds(), time.monotonic()
    config = json.loads((setup.model / "config.json").read_text())
    shape, cores = Shape.of(config), available_cores()
    machine = {
        threads: {
            "GB/s read": bandwidth(threads) / 1e9,
            **{f"{name} TFLOP/s": peak / 1e12 for name, peak in peaks(threads).items()},
        }
        for threads in sorted({1, cores})
    }
    dtype, found = asyncio.run(measure(setup, shape.vocab))
    all_threads = machine[cores]
    peak = all_threads.get(f"{dtype} TFLOP/s", all_threads["float32 TFLOP/s"])
    limits = Machine(all_threads["GB/s read"] * 1e9, peak * 1e12)
    rows = [
        (phase.name, reached(phase.step, shape, BYTES[dtype], seconds, limits))
        for phase, seconds in found
    ]
    share = (others_cpu_seconds() - others) / (time.monotonic() - start)
    lines = [
        *setting_lines("bench/roofline.py", "", load_average),
        f"- mixed, {dtype}, {cores} threads; other processes took {100 * max(0.0, share):.0f} % of "
        "a core meanwhile",
        "- A step's bytes are weights, and keys and values that it reads, once; its time is the "
        "mean of its kind, by the engine's metrics.",
        "- Floor: the longer of bytes / bandwidth and operations / peak, with all threads.",
    ]
    ratio = dict(rows)["decode step of 16"].bandwidth_ratio
    verdict = (
        f"A decode step of 16 reaches {100 * ratio:.0f} % of the bandwidth (goal: {100 * GOAL:.0f} "
        "%)."
    )
    return "\n\n".join(
        [
            "\n".join(lines),
            "### Machine",
            machine_table(machine),
            "### Steps",
            phase_table(rows),
            verdict,
        ]
    )


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="the engine's steps beside the machine's bandwidth and matmul peak"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="of spec.engine, in place of our file's values",
    )
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    model = cached_model(load(FILES["mixed"]).spec.model)
    load_average = os.getloadavg()[0]
    try:
        text = report(load_average, Setup(Path(FILES["mixed"]), model, engine_fields(options.set)))
    except (OperatorError, InvalidObjectError, ValueError, OSError) as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    print(text)
    if options.log:
        keep_report(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
