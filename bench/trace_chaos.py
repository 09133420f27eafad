"""A trace of requests through real workers, undisturbed and then while workers come and go.

    bench/trace_chaos.py [--requests 300] [--seconds 180] [--pause 5] [--seed 0]

A router, two prefill and three decode workers of the sample model (float32, one thread each, etcd
and TLS as in the system tests) get the same trace (`request_trace`) twice.  The second time workers
are killed, drained by command, ended by SIGTERM and added, one step after the other.  Printed are
the requests that were not answered exactly once in whole, the answers whose text differs between
the runs, and what clients saw of the rest.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from request_trace import SimulationTrace, asks_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.system.certificates import make_certificates
from tests.system.chaos import Chaos
from tests.system.client import Json
from tests.system.cluster import Cluster
from tests.system.etcd_server import EtcdServer
from tests.system.trace_load import Exchange, run_trace
from tests.system.worker_process import WorkerProcess

LEASE_SECONDS = 10  # a worker's own; with the tests' 3 a busy machine loses workers that live
VOCABULARY = range(100, 40_000)
POLICY: Json = {
    "moving": {"maxMoves": 16},
    "admission": {"workerWaitSeconds": 60},
    "offload": {"prefillLengthThreshold": 128},
}


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two steps")
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--model-path", type=Path, default=Path.home() / ".cache/pdcluster/smollm2-135m-instruct"
    )
    options = parser.parse_args()
    trace = SimulationTrace(num_requests=options.requests, seconds=options.seconds)
    print(trace.in_words())
    with (
        tempfile.TemporaryDirectory() as folder,
        _cluster(Path(folder), options.model_path) as cluster,
    ):
        asyncio.run(_measure(_Measured(cluster, trace, options.seed, options.pause)))


@dataclass(frozen=True, slots=True)
class _Measured:
    cluster: Cluster
    trace: SimulationTrace
    seed: str
    pause_seconds: float

    @property
    def router(self) -> WorkerProcess:
        return self.cluster.workers["router-0"]

    @property
    def decodes(self) -> list[WorkerProcess]:
        return [
            worker
            for worker in self.cluster.workers.values()
            if worker.settings["role"] == "decode" and worker.is_alive
        ]

    async def run(self, salt: str) -> list[Exchange]:
        """Once.  salt: so that a run finds nothing of another one in the prefix caches"""
        rows = self.trace.rows(self.seed)
        needs_ping = asks_of(rows, self.trace.block_tokens, VOCABULARY, self.seed)
        arrivals = [row.timestamp / 1000 for row in rows]
        return await run_trace(
            str(self.router.client.http.base_url), needs_ping, arrivals, cache_salt=salt
        )


@contextmanager
def _cluster(folder: Path, model: Path) -> Iterator[Cluster]:
    with closing(EtcdServer(folder)) as etcd:
        etcd.start()
        with Cluster("trace", folder, etcd, make_certificates(folder / "tls"), model) as cluster:
            for role, number in (("router", 1), ("prefill", 2), ("decode", 3)):
                for index in range(number):
                    worker = cluster.add_worker(
                        role, f"{role}-{index}", start=False, maxBatchedTokens=256
                    )
                    worker.settings["discovery"]["leaseSeconds"] = LEASE_SECONDS
                    worker.write_policy(POLICY)
                    worker.start()
                    worker.wait_ready()
            yield cluster


async def _measure(measured: _Measured) -> None:
    plain = await measured.run("plain")
    _print("undisturbed", plain)
    chaos = Chaos(measured.cluster, measured.router, POLICY, measured.seed)
    running = asyncio.create_task(measured.run("chaos"))
    while not running.done():
        for step in chaos.steps():
            await asyncio.wait([running], timeout=measured.pause_seconds)
            if running.done():
                break
            await asyncio.to_thread(step)
    disturbed = await running
    _print("workers come and go", disturbed)
    differing = sum(one.text != other.text for one, other in zip(plain, disturbed, strict=True))
    longest = max(
        exchange.token_times[-1] - exchange.sent
        for exchange in disturbed
        if exchange.fault() is None
    )
    drains = ", ".join(f"{seconds:.2f}" for seconds in chaos.drain_seconds) or "none"
    print(f"drains by command, s: {drains}; longest answer {longest:.2f} s")
    moves = {
        f"{reason}, {outcome}": int(count) for reason, outcome, count in _moves(measured.router)
    }
    print(
        f"steps: {dict(sorted(chaos.num_steps.items()))}; moves: {moves}; answers that differ "
        f"between the runs: {differing}"
    )
    await asyncio.to_thread(chaos.all_ready)
    read = {
        worker.name: worker.metrics().by_label("kv_handovers_total", "outcome")
        for worker in measured.decodes
    }
    print(f"KV read from workers that were left: {read}")


def _moves(router: WorkerProcess) -> Iterator[tuple[str, str, float]]:
    metrics = router.metrics()
    for reason in ("lost", "stalled", "draining", "preempted"):
        for outcome in ("moved", "nowhere", "refused"):
            if count := metrics.value("request_moves_total", reason=reason, outcome=outcome):
                yield reason, outcome, count


def _print(name: str, exchanges: list[Exchange]) -> None:
    faults = [fault for exchange in exchanges if (fault := exchange.fault())]
    whole = [exchange for exchange in exchanges if exchange.fault() is None]
    ttft = sorted(exchange.token_times[0] - exchange.sent for exchange in whole)
    gaps = [max(exchange.gaps, default=0.0) for exchange in whole]
    print(
        f"{name}: {len(whole)} of {len(exchanges)} answered once and whole; TTFT mean "
        f"{statistics.mean(ttft):.3f} s, "
        f"median {statistics.median(ttft):.3f} s, p95 {statistics.quantiles(ttft, n=20)[18]:.3f} "
        "s; "
        f"longest gap in an answer: median {statistics.median(gaps):.3f} s, most {max(gaps):.3f} s"
    )
    for fault in faults[:5]:
        print(f"  {fault[:200]}")


if __name__ == "__main__":
    main()
