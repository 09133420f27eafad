"""Cost of our ingress in front of stock vLLM: the same engine processes, asked by us and in another
way, in turn.

    bench/stock_ingress.py [--rounds 3] [--threads 2] [--dtype bfloat16] [--log]
    bench/stock_ingress.py --proxy toy_proxy_server.py    # one prefill and one decode worker
    bench/stock_ingress.py --played                       # a server without compute for vLLM

`pdctl up` starts one vLLM behind one worker, and the other way is vLLM's own port.  With
`--played` vLLM computes nothing, and what is left is our path; beside other work start
it by `chrt --rr 5`, so that it waits for no core.  With `--proxy` it starts
examples/vllm.yaml, and the other way is vLLM's proxy in front of the same two vLLM
servers (tests/v1/kv_connector/nixl_integration of its repository, which its wheel does
not have).  The order of the two changes each round, so that a noise that
lasts hits both; processor time is that of our server processes alone.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml
from layout import cell, table
from setting import LOG_HELP, keep_report, setting_lines
from stats import ratios, summarize
from vllm_server import FOLDER, check_installed, version
from workload import Workload

from pdctl.bench.load import LoadResult, run_load
from pdctl.bench.measure import StartedCluster, end_process, started_cluster
from pdctl.bench.openai import OpenAIServer, http_session
from pdctl.local.machine import free_port

ROOT = Path(__file__).parents[1]
MODEL = Path.home() / ".cache" / "pdcluster" / "smollm2-135m-instruct"
PLAYED_VLLM = ROOT / "bench" / "played_vllm.py"
VOCAB_SIZE = 49152
OURS = "our ingress"
ONE = (Workload("A", 256, 64, 32, concurrency=16), Workload("single", 128, 8, 16, concurrency=1))
PLAYED = (
    Workload("A", 256, 64, 64, concurrency=16),
    Workload("single", 128, 8, 100, concurrency=1),
)
PAIR = (Workload("A", 512, 32, 16, concurrency=8), Workload("single", 512, 8, 8, concurrency=1))
FIGURES = ("output tokens/s", "TTFT p50 ms", "TTFT mean ms", "TPOT p50 ms", "ITL p99 ms")
CPU = ("CPU ms a request", "CPU ms a token")


@dataclass
class Measured:
    """Figures of one workload: by system and name, a value for each round."""

    workload: Workload
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, system: str, name: str, value: float) -> None:
        """Take one round's."""
        self.figures.setdefault(system, {}).setdefault(name, []).append(value)


def main() -> None:
    """Run it as `--help` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--played", action="store_true", help="bench/played_vllm.py for vLLM")
    parser.add_argument("--proxy", type=Path, help="vLLM's proxy, which then is the other way")
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    if not options.played:
        check_installed()
    found, conditions = uvloop.run(measure(options))
    lines = [*setting_lines("bench/stock_ingress.py", "", load_average), *conditions, ""]
    for measured in found:
        lines += [f"{measured.workload.name}: {measured.workload.describe()}", "", rows(measured)]
        lines.append("")
    report = "\n".join(lines)
    print(report)
    if options.log:
        keep_report(report)


async def measure(options: argparse.Namespace) -> tuple[list[Measured], list[str]]:
    """Figures of each workload; and what else is to be said of the run."""
    file, workloads = ("vllm.yaml", PAIR) if options.proxy else ("mixed.yaml", ONE)
    fields = engine(options.threads)
    if options.played:
        workloads, fields["command"] = PLAYED, [sys.executable, str(PLAYED_VLLM), "serve"]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = await stack.enter_async_context(
            started_cluster(with_dtype(file, folder, options.dtype), MODEL, fields)
        )
        other, address = await stack.enter_async_context(other_way(started, options.proxy))
        session = await stack.enter_async_context(http_session())
        systems = {
            OURS: OpenAIServer(session, started.base_url, started.model),
            other: OpenAIServer(session, address, started.model),
        }
        found = [Measured(workload) for workload in workloads]
        for measured in found:
            for name, server in systems.items():
                await send(server, measured.workload.warm_up(), f"warm {name}")
        for number in range(options.rounds):
            order = list(systems)[:: 1 if number % 2 else -1]
            for measured in found:
                for name in order:
                    await take(measured, name, systems[name], number, started)
        page = await (await session.get(f"{started.base_url}/metrics")).text()
    if options.played:
        return found, ["- in place of vLLM: bench/played_vllm.py, the same process for both"]
    return found, conditions(options.threads, options.dtype, page if options.proxy else "")


async def take(
    measured: Measured, name: str, server: OpenAIServer, number: int, started: StartedCluster
) -> None:
    """One workload at one system in one round."""
    before = cpu_seconds(started)
    run = await send(server, measured.workload, f"{number} {name}")
    spent = cpu_seconds(started) - before
    for figure, value in summarize(run).items():
        if figure in FIGURES:
            measured.add(name, figure, value)
    num_tokens = sum(answer.num_tokens for answer in run.complete)
    for figure, count in zip(CPU, (len(run.complete), num_tokens), strict=True):
        measured.add(name, figure, 1e3 * spent / count)


async def send(server: OpenAIServer, workload: Workload, seed: str) -> LoadResult:
    """Send a load whose prompts are in no cache."""
    run = await run_load(server, workload.needs_ping(seed, VOCAB_SIZE), workload.pace(seed))
    assert not run.failures, run.failures[0]
    return run


def with_dtype(file: str, folder: Path, dtype: str) -> Path:
    """A copy of an example whose model has this dtype."""
    found = yaml.safe_load((ROOT / "examples" / file).read_text())
    found["spec"]["model"]["dtype"] = dtype
    copy = folder / file
    copy.write_text(yaml.safe_dump(found))
    return copy


def engine(threads: int) -> dict[str, Any]:
    """Fields of `spec.engine`."""
    return {
        "type": "vllm",
        "command": [str(FOLDER / "bin" / "vllm"), "serve"],
        "args": ["--enforce-eager"],
        "env": [
            {"name": "VLLM_TARGET_DEVICE", "value": "cpu"},
            {"name": "OMP_NUM_THREADS", "value": str(threads)},
        ],
        "maxModelLen": 4096,
        "maxBatchedTokens": 2048,
        "kvCacheMemory": "1Gi",
    }


@asynccontextmanager
async def other_way(started: StartedCluster, proxy: Path | None) -> AsyncIterator[tuple[str, str]]:
    """(name, base URL) of the other way to the same engines."""
    ports = {worker["role"]: port_of_vllm(worker["pid"]) for worker in started.state["workers"]}
    if proxy is None:
        (port,) = ports.values()
        yield "vLLM alone", f"http://127.0.0.1:{port}"
        return
    listens = free_port()
    process = await asyncio.create_subprocess_exec(
        *(str(FOLDER / "bin" / "python"), str(proxy), "--port", str(listens)),
        *("--prefiller-host", "127.0.0.1", "--prefiller-port", str(ports["prefill"])),
        *("--decoder-host", "127.0.0.1", "--decoder-port", str(ports["decode"])),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await listening(listens)
        yield "vLLM's proxy", f"http://127.0.0.1:{listens}"
    finally:
        await end_process(process)


async def listening(port: int) -> None:
    """Wait until something takes connections there."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                writer.close()
                return


def port_of_vllm(pid: int) -> int:
    """Port of the vLLM server that a worker has started, from its command line."""
    for process in psutil.Process(pid).children(recursive=True):
        command = process.cmdline()
        if "serve" in command and "--port" in command:
            return int(command[command.index("--port") + 1])
    raise LookupError(f"no vLLM below process {pid}")


def cpu_seconds(started: StartedCluster) -> float:
    """Processor time of our server processes, without the engines below them."""
    times = [psutil.Process(worker["pid"]).cpu_times() for worker in started.state["workers"]]
    return sum(time.user + time.system for time in times)


def conditions(threads: int, dtype: str, page: str) -> list[str]:
    """Conditions of the run.  page: /metrics of our ingress, where there is a prefill worker."""
    lines = [f"- vLLM {version()}, eager, {dtype}, {threads} threads, the same processes for both"]
    lines += [
        f"- {line}"
        for line in page.splitlines()
        if line.startswith("pdcluster_remote_prefill_total")
    ]
    return lines


def rows(measured: Measured) -> str:
    """The table of one workload."""
    other = next(name for name in measured.figures if name != OURS)
    ours, theirs = measured.figures[OURS], measured.figures[other]
    lines = [
        [name, cell(ours[name]), cell(theirs[name]), cell(ratios(ours[name], theirs[name]))]
        for name in (*FIGURES, *CPU)
        if name in ours
    ]
    return table(("", OURS, other, "ratio"), lines)


if __name__ == "__main__":
    main()
