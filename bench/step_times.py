"""Measure the step times of this machine for `pdctl simulate`, and write them to a file.

    bench/step_times.py FILE [--threads 1] [--model FOLDER] [--times 9]

1. Steps of the model's runner alone (`bench/steps.py`), for rows, context and pairs; and of two
   runners at once, for what workers of one machine take from each other.
2. A mixed worker that serves, for what a step, a token and a request take outside of the model.
3. A prefill and a decode worker, for messages between them and the transfer of KV.

Run it on a machine that does nothing else: about three minutes.
"""

import argparse
import asyncio
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster, Setup, running_cluster
from offload_curve import Placed
from setting import setting_lines

from pdcluster_simulator.simulated_step import SimulatedStep
from pdcluster_simulator.step_model import FORMAT, StepModel, write_step_model
from pdctl.bench.load import Arrivals, BenchRequest, LoadResult, run_load

ROOT = Path(__file__).parents[1]
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
DECODES, CHUNKS = (1, 2, 4, 8, 16, 32, 64), (32, 64, 128, 256)
CONTEXT, LONG = 283, 1037  # of steps.py's decodes, and of its long ones
BLOCK_TOKENS = 16
_LINE = re.compile(r"^(\w+) +([\d.]+) ms", re.MULTILINE)
_BLOCK_BYTES = re.compile(r"reserved kv cache blocks=\d+ block_bytes=(\d+)")
_TRANSFER_BYTES = 1e9  # over loopback; a last chunk is too short to tell


def steps_command(cases: Sequence[str], options: argparse.Namespace) -> list[str]:
    """`bench/steps.py` of these cases, with a spin count as for cores that others may take."""
    own = ["--cases", ",".join(cases), "--times", str(options.times)]
    return [
        *(sys.executable, str(ROOT / "bench" / "steps.py"), "--budget", "256"),
        *("--threads", str(options.threads), "--dtype", options.dtype, *own),
    ]


def measured(outputs: Sequence[str]) -> dict[str, float]:
    """Seconds of each case: the mean over programs of the medians that they print."""
    found: dict[str, list[float]] = {}
    for output in outputs:
        for name, milliseconds in _LINE.findall(output):
            found.setdefault(name, []).append(float(milliseconds) / 1e3)
    return {name: statistics.mean(values) for name, values in found.items()}


def run_steps(cases: Sequence[str], options: argparse.Namespace, at_once: int) -> dict[str, float]:
    """Seconds of each case, with so many programs side by side."""
    programs = [
        subprocess.Popen(steps_command(cases, options), stdout=subprocess.PIPE, text=True)
        for _ in range(at_once)
    ]
    outputs = [program.communicate()[0] for program in programs]
    if any(program.returncode for program in programs):
        raise SystemExit("bench/steps.py failed: run it alone to see why")
    return measured(outputs)


@dataclass(frozen=True, slots=True)
class Fitted:
    """rows: (tokens, seconds) without attention."""

    rows: tuple[tuple[int, float], ...]
    context_seconds: float
    pair_seconds: float


def fit(seconds: Mapping[str, float]) -> Fitted:
    """Rows, and what attention adds to them, of the cases of `run_steps`."""
    of_context = max(0.0, (seconds["long8"] - seconds["decode8"]) / (8 * (LONG - CONTEXT)))
    # The last 256 tokens of a prompt of 1024 attend to 768 more tokens each than its first 256.
    of_pair = max(0.0, (seconds["chunk256"] - seconds["prefill256"]) / (256 * 768))
    rows = {n: seconds[f"decode{n}"] - of_context * n * CONTEXT for n in DECODES}
    for n in CHUNKS:
        chunk = seconds[f"prefill{n}"] - of_pair * n * (n + 1) / 2
        rows[n] = statistics.mean([rows[n], chunk]) if n in rows else chunk
    return Fitted(tuple(sorted(rows.items())), of_context, of_pair)


def prompts(num_tokens: int, count: int, output: int, seed: str) -> list[BenchRequest]:
    """Random tokens: no prefix cache answers."""
    source = random.Random(seed)
    return [
        BenchRequest([source.randrange(256, 40_000) for _ in range(num_tokens)], output)
        for _ in range(count)
    ]


async def sent(
    cluster: Cluster, mode: str, load: Sequence[BenchRequest], concurrency: int
) -> LoadResult:
    """A closed loop."""
    server = cluster.server
    target = Placed(server.session, server.base_url, server.model, mode=mode)
    return await run_load(target, load, Arrivals(max_concurrency=concurrency))


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


async def served(times: StepModel, options: argparse.Namespace) -> StepModel:
    """With what a mixed worker adds to its runner's steps."""
    setup = Setup(ROOT / "examples" / "mixed.yaml", options.model, {"threads": options.threads})
    async with running_cluster("mixed", setup) as cluster:
        await sent(cluster, "auto", prompts(64, 4, 8, "warm"), 1)
        alone = await sent(cluster, "auto", prompts(64, 16, 32, "alone"), 1)
        many = await sent(cluster, "auto", prompts(32, 32, 64, "many"), 8)
    gap = median(alone.latencies_seconds["itl"])
    of_eight = median(many.latencies_seconds["itl"])
    step = max(0.0, gap - times.decode_seconds(1, 80))
    token = max(0.0, (of_eight - times.decode_seconds(8, 8 * 64) - step) / 8)
    first = times.seconds(SimulatedStep(64, pairs=64 * 65 // 2)) + step
    request = max(0.0, median(alone.latencies_seconds["ttft"]) - first)
    return changed(times, step_seconds=step, token_seconds=token, request_seconds=request)


async def paired(times: StepModel, options: argparse.Namespace) -> StepModel:
    """With what a remote prefill adds."""
    setup = Setup(ROOT / "examples" / "chat.yaml", options.model, {"threads": options.threads})
    async with running_cluster("pair", setup) as cluster:
        logs = [Path(worker["log"]).read_text() for worker in cluster.started.state["workers"]]
        await sent(cluster, "remote", prompts(200, 4, 8, "warm"), 1)
        runs = {
            mode: await sent(cluster, mode, prompts(200, 16, 16, mode), 1)
            for mode in ("local", "remote")
        }
    found = {mode: run.latencies_seconds for mode, run in runs.items()}
    # The call and the first token's way back.
    more = median(found["remote"]["ttft"]) - median(found["local"]["ttft"])
    hop = max(0.0, more / 2)
    first_gaps = [result.gaps_seconds[0] for result in runs["remote"].complete]
    gap = median(found["local"]["itl"])
    kv_bytes = float(_BLOCK_BYTES.findall(logs[0])[-1]) / BLOCK_TOKENS
    transfer = median(first_gaps) - gap - 200 * kv_bytes / _TRANSFER_BYTES
    return changed(times, hop_seconds=hop, transfer_seconds=max(0.0, transfer), kv_bytes=kv_bytes)


def changed(times: StepModel, **fields: float) -> StepModel:
    """The same with other values."""
    given = {name: getattr(times, name) for name in times.__struct_fields__}
    return StepModel(**given | fields)


def shared_rates(alone: Mapping[str, float], both: Mapping[str, float]) -> tuple[float, float]:
    """Speed of each of one and of two runners."""
    ratios = [alone[name] / both[name] for name in both]
    return 1.0, min(1.0, statistics.mean(ratios))


def measure(options: argparse.Namespace) -> StepModel:
    """All three parts."""
    cases = [
        *(f"decode{n}" for n in DECODES),
        "long8",
        *(f"prefill{n}" for n in CHUNKS),
        "chunk256",
    ]
    alone = run_steps(cases, options, 1)
    both = run_steps(["decode8", "prefill256"], options, 2)
    found = fit(alone)
    times = StepModel(
        format=FORMAT,
        model=options.model.name,
        gpu="cpu",
        machine=f"{platform.machine()}, {options.threads} threads, {options.dtype}",
        source="bench/step_times.py",
        rows=found.rows,
        context_seconds=found.context_seconds,
        pair_seconds=found.pair_seconds,
        transfer_bytes=_TRANSFER_BYTES,
        kv_bytes=1.0,
        shared_rates=shared_rates(alone, both),
    )
    times = asyncio.run(served(times, options))
    return asyncio.run(paired(times, options))


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--times", type=int, default=9)
    options = parser.parse_args()
    print("\n".join(setting_lines("bench/step_times.py", "", os.getloadavg()[0])), flush=True)
    times = measure(options)
    write_step_model(times, options.file)
    print(options.file.read_text())


if __name__ == "__main__":
    main()
