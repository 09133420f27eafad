"""One of our clusters under test: a PDCluster file that `pdctl up` runs, from its start to its last
process.

Reads what the cluster publishes (its state file, `/metrics`, its workers' logs)
and what the kernel says of its processes.  Knows no workload, and nothing of
the engine's inside.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footprint import Footprint, Watched, idle_footprints
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from stats import EngineCounters
from system import Address

from pdctl.bench.load import BenchRequest, OnChunk, TokenUsage
from pdctl.bench.measure import StartedCluster, started_cluster
from pdctl.bench.openai import OpenAIServer, http_session

_LOADED = re.compile(r"loaded model .*dtype=(\S+) threads=(\d+)")
_RESERVED = re.compile(r"reserved kv cache blocks=(\d+) block_bytes=(\d+)")
_COUNTER = "pdcluster_{}_total"
_STEP = ("pdcluster_engine_step_seconds_count", "pdcluster_engine_step_seconds_sum")
# The engine reports once more as it goes idle; the report crosses two processes before it shows in
# /metrics.
_REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Setup:
    """Cluster to start.  engine: fields of `spec.engine` that replace those of the file"""

    file: Path
    model: Path
    engine: Mapping[str, Any]


@asynccontextmanager
async def running_cluster(name: str, setup: Setup) -> AsyncIterator["Cluster"]:
    """`pdctl up`, from ready to its last process.  Raises StartError when it does not start."""
    async with (
        started_cluster(setup.file, setup.model, setup.engine) as started,
        http_session() as session,
    ):
        yield Cluster(name, started, OpenAIServer(session, started.base_url, started.model))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that serves."""

    name: str
    started: StartedCluster
    server: OpenAIServer

    @property
    def start_seconds(self) -> float:
        """From `pdctl up` to ready."""
        return self.started.start_seconds

    @property
    def address(self) -> Address:
        """Its ingress."""
        return Address(self.started.base_url, self.started.model)

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        """See `load.Target`."""
        return await self.server.send(ask, on_chunk)

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """Each worker's counters, after all work has ended."""
        await asyncio.sleep(_REPORT_SECONDS)
        return {worker["name"]: _counters(await self._samples(worker)) for worker in self._workers}

    async def cached_ratio(self) -> float:
        """Share of the tokens looked up in prefix caches that was found, over all workers, after
        all work has ended.
        """
        await asyncio.sleep(_REPORT_SECONDS)
        samples = [sample for worker in self._workers for sample in await self._samples(worker)]
        found, looked_up = (
            sum(
                sample.value
                for sample in samples
                if sample.name == _COUNTER.format(f"prefix_cache_{what}_tokens")
            )
            for what in ("hit", "query")
        )
        return found / looked_up if looked_up else 0.0

    async def steps(self, kind: str) -> tuple[float, float]:
        """(how many steps of a kind, their seconds) of all workers, after all work has ended."""
        await asyncio.sleep(_REPORT_SECONDS)
        found = [0.0, 0.0]
        for worker in self._workers:
            for sample in await self._samples(worker):
                if sample.name in _STEP and sample.labels["kind"] == kind:
                    found[_STEP.index(sample.name)] += sample.value
        return found[0], found[1]

    async def dtype(self) -> str:
        """Dtype in which its first worker computes."""
        samples = await self._samples(self._workers[0])
        return next(
            sample.labels["dtype"]
            for sample in samples
            if sample.name == "pdcluster_engine_dtype_info" and sample.value
        )

    async def _samples(self, worker: dict[str, Any]) -> list[Sample]:
        text = await self._page(f"http://{worker['http']}/metrics")
        return [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def conditions(self) -> list[str]:
        """Lines that each worker logged as it loaded the model."""
        return [
            f"{self.name}, {worker['name']}: dtype {dtype}, threads {threads}"
            for worker, (dtype, threads) in self._found(_LOADED)
        ]

    async def footprints(self, seconds: float) -> list[Footprint]:
        """Footprint of each worker over so many seconds without a request."""
        reserved = [
            (worker, int(blocks) * int(size)) for worker, (blocks, size) in self._found(_RESERVED)
        ]
        return await idle_footprints(
            [Watched(worker["name"], worker["pid"], kv_bytes) for worker, kv_bytes in reserved],
            seconds,
        )

    async def _page(self, url: str) -> str:
        async with self.server.session.get(url) as response:
            return await response.text()

    @property
    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.started.state["workers"]
        return workers

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """The last match in each worker's log."""
        return [
            (worker, pattern.findall(Path(worker["log"]).read_text())[-1])
            for worker in self._workers
        ]


def _counters(samples: list[Sample]) -> EngineCounters:
    values = {(sample.name, sample.labels.get("outcome")): sample.value for sample in samples}

    def total(name: str, outcome: str | None = None) -> float:
        return values[_COUNTER.format(name), outcome]

    step_seconds = total("prefill_seconds") + total("decode_seconds")
    return EngineCounters(
        total("engine_steps"),
        step_seconds,
        total("engine_overhead_seconds"),
        total("remote_prefill", "ok"),
    )
