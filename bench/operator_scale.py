"""The operator on a real API server with many PDClusters: time to converge, API calls, writes at rest, memory.

    bench/operator_scale.py --objects 100 --rest-seconds 600 [--log]

etcd and kube-apiserver run on loopback without controllers, so StatefulSets
make no pods: what is measured is the operator and the API server, on the same
cores.  Writes are counted twice, by the operator and by the API server.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import yaml
from operator_figures import Reading, Samples, calls_table, histogram_quantile, operator_calls, server_writes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.apiserver.control_plane import ControlPlane  # noqa: E402 - the harness of the tests is this bench's too
from tests.system.etcd_server import free_port  # noqa: E402

NAMESPACE = "bench"
LOG = ROOT / "docs" / "bench" / "LOG.md"
CONVERGE_SECONDS = 1800.0


@dataclass(frozen=True)
class Phase:
    """One phase: what the operator counted in it, what the API server wrote, how long it took, and the operator's CPU and memory."""

    name: str
    seconds: float
    cpu_seconds: float
    rss_bytes: int
    before: Reading
    after: Reading

    def lines(self, objects: int) -> list[str]:
        """The phase as Markdown."""
        reconciles = self.after.operator - self.before.operator
        quantiles = [histogram_quantile(reconciles, "pdcluster_operator_reconcile_seconds", share) for share in (0.5, 0.99)]
        count = reconciles.value("pdcluster_operator_reconcile_seconds_count")
        writes = server_writes(self.before, self.after)
        other = {name: number for name, number in writes.items() if name != "leases"}
        return [
            f"### {self.name}",
            "",
            f"- {self.seconds:.1f} s; operator CPU {self.cpu_seconds:.1f} s; operator RSS at the end {self.rss_bytes / 2**20:.0f} MiB",
            f"- {count:.0f} reconciles, p50 {quantiles[0] * 1000:.0f} ms, p99 {quantiles[1] * 1000:.0f} ms",
            f"- writes that the API server counted, Leases aside: {sum(other.values()):.0f}; of Leases: {writes.get('leases', 0.0):.0f}",
            "",
            *calls_table(operator_calls(reconciles), objects),
            "",
        ]


class Operator:
    """One operator process against a control plane."""

    def __init__(self, plane: ControlPlane, log: Path) -> None:
        self._port = free_port()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PDCLUSTER_")},
            "KUBECONFIG": str(plane.kubeconfig),
            "PDCLUSTER_WORKER_IMAGE": "pdcluster-worker:bench",
            "PDCLUSTER_ETCD_IMAGE": "etcd:bench",
            "PDCLUSTER_HTTP_PORT": str(self._port),
            "POD_NAMESPACE": "default",
            "POD_NAME": "bench",
        }
        command = [sys.executable, "-m", "pdcluster_operator.main"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._usage = psutil.Process(self._process.pid)

    def metrics(self) -> Samples:
        """What /metrics says now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as reply:
            return Samples.parse(reply.read().decode())

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        times = self._usage.cpu_times()
        return times.user + times.system

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(self._usage.memory_info().rss)

    def stop(self) -> None:
        """End it in good order."""
        self._process.terminate()
        self._process.wait(60)


class Bench:
    """The control plane, its operator, and the phases so far."""

    def __init__(self, plane: ControlPlane, folder: Path, objects: int) -> None:
        self._plane, self._folder, self._objects = plane, folder, objects
        self.operator = self._start()
        self.phases: list[Phase] = []

    def restart(self) -> None:
        """Another operator process takes over."""
        self.operator.stop()
        self.operator = self._start()

    def _start(self) -> Operator:
        operator = Operator(self._plane, self._folder / "operator.log")
        wait_until(lambda: self._is_leading(operator), 60.0, "the operator leads")
        return operator

    @staticmethod
    def _is_leading(operator: Operator) -> bool:
        with contextlib.suppress(OSError):
            return operator.metrics().value("pdcluster_operator_is_leader") == 1
        return False

    def apply(self) -> None:
        """Apply every PDCluster, as fast as kubectl does: one request after the other, a hundred a command."""
        template = yaml.safe_load((ROOT / "examples" / "cpu-cluster.yaml").read_text())
        documents = []
        for number in range(self._objects):
            template["metadata"] = {"name": f"chat-{number}", "namespace": NAMESPACE}
            documents.append(yaml.safe_dump(template))
        for batch in (documents[start : start + 100] for start in range(0, len(documents), 100)):
            self._plane.kubectl("apply", "--server-side", "--filename", "-", input="---\n".join(batch))

    def is_converged(self) -> bool:
        """Every PDCluster has its two StatefulSets and its etcd, and a status of its generation."""
        made = self._plane.kubectl("get", "statefulsets", "--namespace", NAMESPACE, "--output", "name").split()
        if len(made) < 3 * self._objects:
            return False
        clusters = json.loads(self._plane.kubectl("get", "--raw", f"/apis/pdcluster.io/v1alpha1/namespaces/{NAMESPACE}/pdclusters"))[
            "items"
        ]
        return all(item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"] for item in clusters)

    def is_settled(self) -> bool:
        """No work waits and none was done for two seconds."""
        before = self.operator.metrics()
        time.sleep(2)
        after = self.operator.metrics()
        name = "pdcluster_operator_reconcile_seconds_count"
        return before.value(name) == after.value(name) and after.value("pdcluster_operator_queue_depth") == 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        before, cpu, started = self._read(), self.operator.cpu_seconds(), time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.phases.append(Phase(name, seconds, self.operator.cpu_seconds() - cpu, self.operator.rss_bytes(), before, self._read()))

    def _read(self) -> Reading:
        return Reading(self.operator.metrics(), Samples.parse(self._plane.kubectl("get", "--raw", "/metrics")))


def wait_until(predicate: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll once a second.  Raises TimeoutError saying what did not happen."""
    deadline = time.monotonic() + timeout_seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_seconds:.0f} s: {what}")
        time.sleep(1)


def run(objects: int, rest_seconds: float) -> str:
    """All phases; the report as Markdown."""
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-bench-") as folder,
        ControlPlane(Path(folder), crds=ROOT / "crds") as plane,
    ):
        plane.kubectl("create", "namespace", NAMESPACE)
        bench = Bench(plane, Path(folder), objects)
        try:
            with bench.phase(f"{objects} PDClusters applied at once, until all children exist"):
                bench.apply()
                wait_until(bench.is_converged, CONVERGE_SECONDS, "all children exist")
            wait_until(bench.is_settled, CONVERGE_SECONDS, "the queue is empty")
            with bench.phase(f"{rest_seconds:.0f} s of steady state"):
                time.sleep(rest_seconds)
            bench.restart()
            with bench.phase("The operator restarted, until it has looked at every object"):
                wait_until(bench.is_settled, CONVERGE_SECONDS, "the queue is empty")
            return "\n".join([*_conditions(objects), *(line for phase in bench.phases for line in phase.lines(objects))])
        finally:
            bench.operator.stop()


def _conditions(objects: int) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    memory = psutil.virtual_memory().total / 2**30
    return [
        f"## {datetime.now(UTC):%Y-%m-%d}, commit {commit}: the operator with {objects} PDClusters",
        "",
        f"- Command: `{shlex.join(['bench/operator_scale.py', *sys.argv[1:]])}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- Machine: {psutil.cpu_count()} cores, {memory:.0f} GiB, shared by operator, kube-apiserver and etcd (no fsync)",
        "- Quantiles are interpolated in the histogram's bucket",
        f"- Load average at the end {os.getloadavg()[0]:.2f}",
        f"- Each PDCluster is examples/cpu-cluster.yaml under another name; Python {sys.version.split()[0]}",
        "",
    ]


def main() -> None:
    """Parse the command line, run, print, and append to the log where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=100)
    parser.add_argument("--rest-seconds", type=float, default=600.0)
    parser.add_argument("--log", action="store_true", help="append the report to docs/bench/LOG.md")
    arguments = parser.parse_args()
    report = run(arguments.objects, arguments.rest_seconds)
    sys.stdout.write(report)
    if arguments.log:
        with LOG.open("a") as log:
            log.write("\n" + report)


if __name__ == "__main__":
    main()
