"""The operator on a real API server with many PDClusters: time to converge, duration of passes, API
calls, writes at rest, memory.

    make bench-operator                          100 PDClusters, 600 s at rest, logged
    bench/operator_scale.py --objects 1000       another number of PDClusters (default 100)
                            --rest-seconds 10    another time at rest (default 600)
                            --concurrency 1      PDClusters reconciled at once (default: its own)
                            --replicas 4         workers of each of its two pools (default 1)
                            --pods-per-replica 2 again with workers of so many pods, and the cost of
                                                 one beside that of a worker of one pod
                            --log                append the report to bench/results

Three phases: everything is applied at once, nothing is done, the operator is
restarted.  etcd and kube-apiserver run on loopback without controllers, so
StatefulSets make no pods (the operator looks again and again for the reason,
and at rest that is all that it does): what is measured is the operator and the
API server, on the same cores.  Writes are counted by the API server, calls by
the operator, and every pass is a line of its log.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from operator_figures import Phase, Samples, WorkerCost, cost_table, passes_table, read_passes
from operator_load import NAMESPACE, Load
from setting import LOG_HELP, keep_report, setting_lines

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.apiserver.control_plane import ControlPlane  # noqa: E402 - the harness of the tests is this bench's too
from tests.ports import free_port  # noqa: E402 - found by the path above, too

CONVERGE_SECONDS = 1800.0
MEMORY_LIMIT = "4GiB"
"""Memory of the API server: it must not be short of memory when the operator is measured."""

ENDING_SECONDS = 1.0
"""Time from the moment that its port is closed until it has ended; one that starts has not opened
it yet.
"""

SERVERS = ("kube-apiserver", "etcd")
"""Processes of the control plane, whose CPU is read from /proc beside the operator's."""

WRITING = ("apply", "create", "patch", "delete")
"""Verbs of the operator's writes; it updates nothing but its Lease."""


@dataclass
class Operator:
    """One operator process against a control plane.  log: its stderr goes there; concurrency: 0 =
    the operator's default.
    """

    plane: ControlPlane
    log: Path
    concurrency: int = 0
    _port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("PDCLUSTER_")
            },
            "KUBECONFIG": str(self.plane.kubeconfig),
            "PDCLUSTER_WORKER_IMAGE": "pdcluster-worker:bench",
            "PDCLUSTER_ETCD_IMAGE": "etcd:bench",
            "PDCLUSTER_HTTP_PORT": str(self._port),
            "PDCLUSTER_LOG_LEVEL": "debug",  # every reconcile is logged
            "POD_NAMESPACE": "default",
            "POD_NAME": "bench",
            **({"PDCLUSTER_CONCURRENCY": str(self.concurrency)} if self.concurrency else {}),
        }
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "pdcluster_operator"]
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._usage = psutil.Process(self._process.pid)

    def metrics(self) -> Samples:
        """Read /metrics.  Raises RuntimeError with the end of its log when it has ended."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/metrics", timeout=30
            ) as reply:
                return Samples.parse(reply.read().decode())
        except OSError:
            self.check(ENDING_SECONDS)
            raise

    def check(self, seconds: float = 0.0) -> None:
        """Raises RuntimeError with the end of its log when it has ended, or ends within so many
        seconds.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
            raise RuntimeError(
                f"the operator ended with {code}; its log "
                f"ends:\n{self._log_without_passes()[-4000:]}"
            )

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        return cpu_seconds(self._usage)

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(self._usage.memory_info().rss)

    def peak_rss_bytes(self) -> int:
        """The most resident memory so far, as the kernel has kept it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
        )

    def is_leading(self) -> bool:
        """Return whether it answers and leads.  Raises as `metrics`."""
        with contextlib.suppress(OSError):
            return self.metrics().value("pdcluster_operator_is_leader") == 1
        return False

    def _log_without_passes(self) -> str:
        return "".join(
            line for line in self.log.read_text().splitlines(keepends=True) if " DEBUG " not in line
        )

    def stop(self) -> None:
        """End it in good order."""
        self._process.terminate()
        self._process.wait(60)


@dataclass
class Bench:
    """The control plane, its operator, and the phases so far.  folder: for the log"""

    plane: ControlPlane
    folder: Path
    load: Load
    concurrency: int = 0
    phases: list[Phase] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start()
        self.empty_rss_bytes = self.operator.rss_bytes()

    def _start(self) -> None:
        self.operator = Operator(self.plane, self.folder / "operator.log", self.concurrency)
        wait_until(self.operator.is_leading, 60.0, "the operator leads")

    def apply(self) -> None:
        """Apply every PDCluster, as fast as kubectl does: one request after the other, a hundred a
        command.
        """
        documents = self.load.documents()
        for batch in (documents[start : start + 100] for start in range(0, len(documents), 100)):
            self.plane.kubectl(
                "apply", "--server-side", "--filename", "-", input="---\n".join(batch)
            )

    def is_converged(self) -> bool:
        """Every PDCluster has its children, and a status of its generation.

        Raises RuntimeError when the operator has ended.
        """
        self.operator.check()
        if any(self._count(path) < number for path, number in self.load.children().items()):
            return False
        clusters = self._get(f"/apis/pdcluster.io/v1alpha1/namespaces/{NAMESPACE}/pdclusters")[
            "items"
        ]
        return all(
            item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
            for item in clusters
        )

    def is_settled(self) -> bool:
        """No work waits and nothing was written for two seconds."""
        before = self._writes()
        time.sleep(2)
        return (
            self._writes() == before
            and self.operator.metrics().value("pdcluster_operator_queue_depth") == 0
        )

    def has_seen_all(self) -> bool:
        """The operator has ended at least one pass for each object, and no work waits."""
        metrics = self.operator.metrics()
        num_passes = metrics.value("pdcluster_operator_reconcile_seconds_count")
        return (
            num_passes >= self.load.objects and metrics.value("pdcluster_operator_queue_depth") == 0
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Measure what happens inside; a new operator counts from its start.

        Yields the phase's notes.
        """
        notes: list[str] = []
        first, counted, cpu = self.operator, self.operator.metrics(), self.operator.cpu_seconds()
        servers = self._server_cpu_seconds()
        server, log_size, started = (
            self._server(),
            self.operator.log.stat().st_size,
            time.monotonic(),
        )
        yield notes
        seconds, last = time.monotonic() - started, self.operator
        if last is not first:
            counted, cpu = Samples(), 0.0
        passes = read_passes(last.log.read_bytes()[log_size:].decode())
        operator = last.metrics() - counted
        used = last.cpu_seconds() - cpu
        self.phases.append(
            Phase(
                name,
                seconds,
                operator,
                self._server() - server,
                passes,
                used,
                last.rss_bytes(),
                last.peak_rss_bytes(),
                {name: now - servers[name] for name, now in self._server_cpu_seconds().items()},
                notes,
            ),
        )

    def restart(self) -> None:
        """Another operator process takes over; returns when it leads."""
        self.operator.stop()
        self._start()

    def _server_cpu_seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(psutil.Process(self.plane.pid(name))) for name in SERVERS}

    def _writes(self) -> dict[tuple[str, ...], float]:
        calls = self.operator.metrics().by("pdcluster_operator_api_calls_total", "verb", "kind")
        return {call: number for call, number in calls.items() if call[0] in WRITING}

    def _server(self) -> Samples:
        return Samples.parse(self._read("/metrics"))

    def _count(self, path: str) -> int:
        """Count objects without reading them."""
        page = self._get(f"{path}?limit=1")
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))

    def _get(self, path: str) -> Any:
        return json.loads(self._read(path))

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(
            f"{self.plane.url}{path}", timeout=60, context=self.plane.tls
        ) as reply:
            return str(reply.read().decode())


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process so far, in user and kernel."""
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_until(predicate: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll.  Raises TimeoutError saying what did not happen."""
    deadline = time.monotonic() + timeout_seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_seconds:.0f} s: {what}")
        time.sleep(0.25)


def run(load: Load, rest_seconds: float, concurrency: int) -> tuple[list[str], WorkerCost]:
    """All phases: the report as lines of Markdown, and what a worker costs.

    Raises TimeoutError when the operator does not get there.
    """
    objects = f"{load.objects} PDClusters"
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-bench-") as folder,
        ControlPlane(Path(folder), crds=ROOT / "crds", memory_limit=MEMORY_LIMIT) as plane,
    ):
        plane.kubectl("create", "namespace", NAMESPACE)
        bench = Bench(plane, Path(folder), load, concurrency)
        try:
            with bench.phase(
                f"{objects} applied at once, until nothing more is written for two seconds"
            ) as notes:
                started = time.monotonic()
                bench.apply()
                wait_until(bench.is_converged, CONVERGE_SECONDS, "all children exist")
                notes.append(
                    "Converged: all children of all PDClusters exist after "
                    f"{time.monotonic() - started:.1f} s"
                )
                wait_until(bench.is_settled, CONVERGE_SECONDS, "the operator writes nothing more")
            with bench.phase(f"{rest_seconds:.0f} s of steady state"):
                time.sleep(rest_seconds)
            with bench.phase("The operator restarted, until it has looked at every object"):
                bench.restart()
                wait_until(bench.has_seen_all, CONVERGE_SECONDS, "every object was looked at")
            phases = [line for phase in bench.phases for line in phase.lines(load.objects)]
            passes = passes_table([each for phase in bench.phases for each in phase.passes])
            cost = WorkerCost.of(bench.phases, bench.empty_rss_bytes, load.num_workers)
            return [*phases, "### All phases", "", *passes, ""], cost
        finally:
            bench.operator.stop()


def positive(text: str) -> int:
    """A whole number from 1.  Raises argparse.ArgumentTypeError saying so."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def main() -> None:
    """Parse the command line, run, print, and append to the log where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=positive, default=100, help="PDClusters (%(default)s)")
    parser.add_argument(
        "--rest-seconds", type=float, default=600.0, help="time at rest (%(default).0f)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=0,
        help="PDClusters that the operator works on at once (its default)",
    )
    parser.add_argument(
        "--replicas", type=positive, default=1, help="workers of each pool (%(default)s)"
    )
    parser.add_argument(
        "--pods-per-replica", type=positive, default=1, help="pods of each worker (%(default)s)"
    )
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    arguments = parser.parse_args()
    load_average, lines, costs = os.getloadavg()[0], [], {}
    for pods in sorted({1, arguments.pods_per_replica}):
        load = Load(arguments.objects, arguments.replicas, pods)
        name = f"{load.num_workers} workers of {pods} pods"
        phases, costs[name] = run(load, arguments.rest_seconds, arguments.concurrency)
        lines += [f"### {name}", "", *phases]
    conditions = setting_lines("bench/operator_scale.py", "", load_average)
    conditions += [
        f"- {arguments.objects} PDClusters, each examples/chat.yaml under another name",
        "- Operator, kube-apiserver and etcd (no fsync) share the machine",
        "",
    ]
    report = "\n".join([*conditions, *lines, *cost_table(costs)])
    print(report)
    if arguments.log:
        keep_report(report)


if __name__ == "__main__":
    main()
