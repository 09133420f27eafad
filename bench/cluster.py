"""One of our clusters under test: a PDCluster file that `pdctl up` runs, from its start to its last process.

Reads what the cluster publishes (its state file, `/metrics`, its workers' logs)
and what the kernel says of its processes; it imports nothing of ours, so that
it measures what a user gets.  Knows no workload.
"""

import asyncio
import json
import re
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from client import REQUEST_LIMIT_SECONDS, OnChunk, stream_completion
from prometheus_client.parser import text_string_to_metric_families
from stats import EngineCounters

START_LIMIT_SECONDS = 180.0
STOP_LIMIT_SECONDS = 30.0

_READY = re.compile(r"^ready: (http://\S+)")
_LOADED = re.compile(r"loaded model .*dtype=(\S+) threads=(\d+)")
_RESERVED = re.compile(r"reserved kv cache blocks=(\d+) block_bytes=(\d+)")
_COUNTER = "pdcluster_{}_total"
# The engine reports once more as it goes idle; the report crosses two processes before it shows in /metrics.
_REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Footprint:
    """A worker that has nothing to do.  cpu_percent: of one core.  Bytes are (resident, unique to the process) for each process."""

    worker: str
    cpu_percent: float
    server_bytes: tuple[int, int]
    engine_bytes: tuple[int, int]
    kv_bytes: int


@asynccontextmanager
async def running_cluster(name: str, file: Path) -> AsyncIterator["Cluster"]:
    """`pdctl up FILE` on a free port from ready to its last process; state and logs are in a folder that goes with it.

    Raises RuntimeError with its output when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="pdcluster-bench-", ignore_cleanup_errors=True) as folder:
        start = time.monotonic()
        command = ("-m", "pdcluster_operator", "up", str(file), "--no-progress", "--port", "0", "--state-dir", folder)
        # In its own session: Ctrl-C reaches it through us only, once.
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        try:
            url = await _ready_url(process, file)
            start_seconds = time.monotonic() - start
            state = json.loads(next(Path(folder).glob("*/*/state.json")).read_text())
            async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_SECONDS, limits=httpx.Limits(), trust_env=False) as http:
                yield Cluster(name, start_seconds, state, http)
        finally:
            await end_process(process)


async def end_process(process: Process) -> None:
    """Ask it to end with SIGTERM, kill it when it takes too long."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.communicate(), STOP_LIMIT_SECONDS)
    except TimeoutError:
        process.kill()  # pdctl's children die with it
        await process.wait()


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that serves.  state: pdctl's state file; http: a client at its base URL."""

    name: str
    start_seconds: float
    state: dict[str, Any]
    http: httpx.AsyncClient

    async def generate(self, prompt: list[int], num_output_tokens: int, on_chunk: OnChunk) -> int:
        """See `client.Target`."""
        body = {
            "model": self.state["model"],
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return await stream_completion(self.http, body, on_chunk)

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """Each worker's counters, after all work has ended."""
        await asyncio.sleep(_REPORT_SECONDS)
        texts = [(await self.http.get(f"http://{worker['http']}/metrics")).text for worker in self._workers]
        return {worker["name"]: _counters(text) for worker, text in zip(self._workers, texts, strict=True)}

    def conditions(self) -> list[str]:
        """What each worker said as it loaded the model."""
        return [f"{worker['name']}: dtype {dtype}, threads {threads}" for worker, (dtype, threads) in self._found(_LOADED)]

    async def footprints(self, seconds: float) -> list[Footprint]:
        """What each worker uses over so many seconds without a request."""
        servers = [psutil.Process(worker["pid"]) for worker in self._workers]
        before = [_cpu_seconds(server) for server in servers]
        start = time.monotonic()
        await asyncio.sleep(seconds)
        used = [100 * (_cpu_seconds(server) - b) / (time.monotonic() - start) for server, b in zip(servers, before, strict=True)]
        kv_bytes = [int(blocks) * int(size) for _, (blocks, size) in self._found(_RESERVED)]
        rows = zip(self._workers, used, servers, kv_bytes, strict=True)
        return [
            Footprint(worker["name"], cpu, _memory([server]), _memory(server.children(recursive=True)), kv)
            for worker, cpu, server, kv in rows
        ]

    @property
    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.state["workers"]
        return workers

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """The last match in each worker's log."""
        return [(worker, pattern.findall(Path(worker["log"]).read_text())[-1]) for worker in self._workers]


async def _ready_url(process: Process, file: Path) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(START_LIMIT_SECONDS):
            async for line in process.stdout:
                lines.append(line.decode())
                if ready := _READY.match(lines[-1]):
                    return ready[1]
    except TimeoutError:
        lines.append(f"not ready in {START_LIMIT_SECONDS:g} s")
    raise RuntimeError(f"pdctl up {file} did not start:\n{''.join(lines)}")


def _counters(text: str) -> EngineCounters:
    values = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def total(name: str, outcome: str | None = None) -> float:
        return values[_COUNTER.format(name), outcome]

    step_seconds = total("prefill_seconds") + total("decode_seconds")
    return EngineCounters(total("engine_steps"), step_seconds, total("engine_overhead_seconds"), total("remote_prefill", "ok"))


def _cpu_seconds(server: psutil.Process) -> float:
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _memory(processes: list[psutil.Process]) -> tuple[int, int]:
    infos = [process.memory_full_info() for process in processes]
    return sum(info.rss for info in infos), sum(info.uss for info in infos)
