"""A real operator process, started as in a pod, and what it says of itself over HTTP."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.system.waiting import wait_for

START_SECONDS = 120.0
STOP_SECONDS = 60.0
WRITES = ("apply", "create", "delete", "patch", "update")
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class OperatorProcess:
    """Runs while it is entered; ready, or standing by, once it is entered.

    folder:   where its log goes
    settings: environment variables over the ones that tests use
    """

    def __init__(
        self, folder: Path, kubeconfig: Path, *, name: str = "operator", **settings: str
    ) -> None:
        self._log = folder / f"{name}.log"
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KUBECONFIG": str(kubeconfig),
            "POD_NAME": name,
            "PDCLUSTER_WORKER_IMAGE": "example/worker:1",
            "PDCLUSTER_ETCD_IMAGE": "example/etcd:1",
            "PDCLUSTER_HTTP_PORT": "0",
            "PDCLUSTER_LEADER_ELECTION": "false",
            "PDCLUSTER_RESYNC_SECONDS": "1",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it is ready or stands by."""
        launcher = str(files("pdctl.local").joinpath("launcher.py"))  # it dies with the tests
        command = [sys.executable, "-m", "pdcluster_operator"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", launcher, str(os.getpid()), *command],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        wait_for(
            self._is_ready,
            START_SECONDS,
            lambda: f"the operator is not ready; its log ends:\n{self.log_end}",
        )

    def kill(self) -> None:
        """End it at once, as a node that dies."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """SIGTERM, as Kubernetes stops a pod; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        assert self._process is not None
        return self._process.wait(timeout=STOP_SECONDS)

    @property
    def pid(self) -> int:
        """Pid of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    @property
    def log_end(self) -> str:
        """Its last lines."""
        return "\n".join(self.log.splitlines()[-40:])

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of its HTTP server; (0, "") while there is none."""
        found = re.search(r"http_port=(\d+)", self.log)
        if found is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}{path}", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        samples = _SAMPLE.findall(self.get("/metrics")[1])
        return sum(
            float(value)
            for found, text, value in samples
            if found == name and wanted <= set(text.split(","))
        )

    def num_writes(self) -> float:
        """Requests that write, those for the Lease aside."""
        name = "pdcluster_operator_api_calls_total"
        return sum(
            self.metric(name, verb=verb) - self.metric(name, verb=verb, kind="Lease")
            for verb in WRITES
        )

    def await_resyncs(self, count: int) -> None:
        """Wait until everything was listed, and all PDClusters were looked at, so
        many times more.
        """
        before = self._num_passes()
        wait_for(
            lambda: self._num_passes() >= before + count + 1,
            START_SECONDS,
            lambda: f"no resync; the log ends:\n{self.log_end}",
        )

    def _num_passes(self) -> float:
        return self.metric(
            "pdcluster_operator_api_calls_total", verb="list", kind="Service", code="200"
        )

    def _is_ready(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the operator ended with {code}; its log ends:\n{self.log_end}"
        return self.get("/readyz")[0] == 200
