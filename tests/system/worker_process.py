"""One real worker: `python -m pdcluster_worker` with its two files, as `pdctl` or a pod would start
it.

The handle outlives the process: `restart` starts the same worker again, at the
addresses that it had.  Addresses come from its etcd record.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdcluster_worker.processes.server_process import SERVER_NICENESS
from tests.system.client import Client, Json
from tests.system.waiting import wait_for

READY_SECONDS = 120.0
END_SECONDS = 90.0
SETTLE_SECONDS = 60.0

_UNHANDLED = ("Traceback", "was destroyed but it is pending", "was never retrieved", "unhandled")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples: Samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """A sample's value, `pdcluster_` left out of its name; 0 when it has not been
        counted yet.
        """
        return self._samples.get((f"pdcluster_{name}", tuple(sorted(labels.items()))), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {
            dict(labels)[label]: value
            for (sample, labels), value in self._samples.items()
            if sample == f"pdcluster_{name}"
        }


class WorkerProcess:
    """A worker of a cluster.  settings: its engine file; record: reads its etcd record, None
    without one.
    """

    def __init__(
        self, name: str, folder: Path, settings: Json, record: Callable[[], Json | None]
    ) -> None:
        self.name = name
        self.settings = settings
        self.environment: dict[str, str] = {}  # of each start, over ours
        self.log = folder / f"{name}.log"
        self._read_record = record
        self._engine_file, self._policy_file = (
            folder / f"{name}.engine.yaml",
            folder / f"{name}.policy.yaml",
        )
        self.write_policy({})
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._record: Json | None = None
        self._previous_engine_id = ""
        self._num_checked_lines = 0

    # --- life ---------------------------------------------------------------------------------

    def start(self, **environment: str) -> None:
        """Start the process; returns at once."""
        if self._record is not None:
            # its record may outlive it until the lease ends
            self._previous_engine_id = self._record["engine_id"]
        command, identity = self.invocation()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **identity, **self.environment, **environment},
            )

    def invocation(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Command that starts it, whose files are written, and its environment over ours."""
        self._engine_file.write_text(json.dumps(self.settings))
        files = ("--engine-config", str(self._engine_file), "--policy", str(self._policy_file))
        identity = {"POD_NAME": self.name, "POD_NAMESPACE": "test", "POD_IP": "127.0.0.1"}
        return (sys.executable, "-m", "pdcluster_worker", *files), identity

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until it is registered and takes requests."""
        wait_for(
            self._is_ready,
            seconds,
            lambda: f"{self.name} is not ready: record={self._read_record()}",
        )

    def restart(self, *, wait: bool = True) -> None:
        """Start again after its end, where it listened before."""
        self.settings["listen"].update(
            {kind: port_of(self.record[f"{kind}_address"]) for kind in ("http", "grpc", "kv")}
        )
        self.start()
        if wait:
            self.wait_ready()

    def kill(self) -> None:
        """SIGKILL the server process; its engine must die with it."""
        engine_pid = self.engine_pid
        self.process.kill()
        self.process.wait(END_SECONDS)
        wait_for(
            lambda: not _is_alive(engine_pid),
            END_SECONDS,
            f"the engine process of {self.name} is gone",
        )

    def engine_pid_of(self, rank: int) -> int:
        living = (
            child for child in _children(self.process.pid) if child.status() != psutil.STATUS_ZOMBIE
        )
        (pid,) = (child.pid for child in living if ["--rank", str(rank)] == child.cmdline()[-2:])
        return pid

    def let_engines_yield(self) -> None:
        """Give its engines a niceness above the test's, as the server process of one engine has.

        On a busy machine they would be done before the server, and the test, had their turn.
        """
        niceness = os.nice(0) + SERVER_NICENESS
        for child in _children(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in child.threads():  # Linux counts the niceness of each by itself
                    os.setpriority(os.PRIO_PROCESS, thread.id, niceness)

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """The engine process does nothing within the block (SIGSTOP); the worker may be killed in
        it.
        """
        engine = psutil.Process(self.engine_pid)
        engine.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()

    def terminate(self) -> None:
        """Send SIGTERM; returns at once."""
        self.process.terminate()

    def wait_end(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait(END_SECONDS)

    def close(self) -> None:
        # its pid is its own only until then
        if self._process is not None and self._process.poll() is None:
            children = _children(self._process.pid, recursive=True)
            self._process.kill()
            self._process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- facts --------------------------------------------------------------------------------

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def engine_pid(self) -> int:
        """The engine process, the worker's only child."""
        (child,) = _children(self.process.pid)
        return child.pid

    @property
    def record(self) -> Json:
        assert self._record is not None, f"{self.name} was never ready"
        return self._record

    @property
    def client(self) -> Client:
        assert self._client is not None, f"{self.name} was never ready"
        return self._client

    @property
    def block_bytes(self) -> int:
        said = re.search(r"reserved kv cache .*block_bytes=(\d+)", self.log.read_text())
        assert said is not None, f"{self.name} has not said it"
        return int(said[1])

    def num_decode_peers(self) -> float:
        return self.metrics().value("peers", role="decode", state="ready")

    def metrics(self) -> Metrics:
        return Metrics(self.client.http.get("/metrics").raise_for_status().text)

    def blocks(self) -> dict[str, int]:
        return {
            state: int(value)
            for state, value in self.metrics().by_label("kv_blocks", "state").items()
        }

    def growth(self, before: Metrics, name: str, **labels: str) -> float:
        return self.metrics().value(name, **labels) - before.value(name, **labels)

    def settled_metrics(self) -> Metrics:
        """With what the engine reports up to 0.1 s late."""
        time.sleep(0.5)
        return self.metrics()

    def wait_growth(self, before: Metrics, name: str, expected: float, **labels: str) -> None:
        """Wait until a counter has grown by exactly that much (the engine reports up to 0.1 s
        late).
        """
        self.wait_for(
            lambda: self.growth(before, name, **labels) == expected,
            lambda: f"{name}{labels} grew by {self.growth(before, name, **labels)}, not {expected}",
        )

    def wait_for(self, predicate: Callable[[], bool], describe: Callable[[], object] | str) -> None:
        wait_for(predicate, SETTLE_SECONDS, describe)

    def log_tail(self, num_lines: int = 60) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
            if self.log.exists()
            else ""
        )

    def unhandled_errors(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        fresh, self._num_checked_lines = lines[self._num_checked_lines :], len(lines)
        return [line for line in fresh if any(sign in line for sign in _UNHANDLED)]

    def write_policy(self, policy: Json) -> None:
        fresh = self._policy_file.with_suffix(".new")
        fresh.write_text(json.dumps(policy))
        fresh.replace(self._policy_file)

    def take_policy(self, policy: Json) -> None:
        """Replace the policy file of a worker that runs, and wait until the other policy is in
        force.
        """

        def num_reloads() -> int:
            return self.log.read_text(errors="replace").count("policy reloaded")

        before = num_reloads()
        self.write_policy(policy)
        self.wait_for(lambda: num_reloads() > before, "the policy is taken")

    def _is_ready(self) -> bool:
        assert self.is_alive, (
            f"{self.name} ended with {self.process.returncode}: {self.log_tail(10)}"
        )
        record = self._read_record()
        if record is None or record["engine_id"] in ("", self._previous_engine_id):
            return False
        if (
            self._client is None
            or str(self._client.http.base_url) != f"http://{record['http_address']}"
        ):
            self._reconnect(record)
        try:
            is_ready = self.client.http.get("/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False
        if is_ready:
            self._record = record
        return is_ready

    def _reconnect(self, record: Json) -> None:
        if self._client is not None:
            self._client.close()
        self._client = Client(f"http://{record['http_address']}")


def port_of(address: str) -> int:
    """Port of host:port."""
    return int(address.rpartition(":")[2])


def _children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_settings(**values: Any) -> Json:
    """Sizes of a tiny engine: chunks of 64 tokens, one thread."""
    return {
        "blockSize": 16,
        "maxBatchedTokens": 64,
        "maxSequences": 32,
        "numBlocks": 512,
        "threads": 1,
        **values,
    }
