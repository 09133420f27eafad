"""A whole PDCluster of real processes: etcd, workers of any role, a CA; nothing is mocked.

Several clusters can share one etcd and one CA; their names keep them apart.
Closing a cluster ends every process that it started.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.ports import free_port
from tests.system.certificates import Certificates
from tests.system.client import MODEL, Json
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for
from tests.system.worker_process import SETTLE_SECONDS, WorkerProcess, engine_settings

LEASE_SECONDS = 3
OPEN: "list[Cluster]" = []
"""Clusters that run now, for the report of a failed test."""


class Cluster:
    """Workers of one name on one etcd.

    folder: takes configuration files and logs.
    model:  the model folder of every worker unless one gets its own.

    `lease_seconds` is of each worker that is added after it was set.
    """

    def __init__(
        self, name: str, folder: Path, etcd: EtcdServer, certificates: Certificates, model: Path
    ) -> None:
        self.name = name
        self.etcd = etcd
        self.lease_seconds = LEASE_SECONDS
        self.workers: dict[str, WorkerProcess] = {}
        self._folder = folder / name
        self._folder.mkdir()
        self._certificates = certificates
        self._model = model
        OPEN.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        OPEN.remove(self)
        for worker in self.workers.values():
            worker.close()

    # --- workers ------------------------------------------------------------------------------

    def add_worker(
        self, role: str, name: str, *, model: Path | None = None, start: bool = True, **engine: Any
    ) -> WorkerProcess:
        """A new worker, started but not waited for; `engine` goes over the engine
        settings of all.
        """
        settings = {
            "cluster": self.name,
            "revision": "r1",
            "role": role,
            "pool": "cpu",
            "model": {"name": MODEL, "path": str(model or self._model), "dtype": "float32"},
            "discovery": {"endpoints": [self.etcd.endpoint], "leaseSeconds": self.lease_seconds},
            "tls": self._certificates.settings(),
            "engine": engine_settings(**engine),
            "listen": {
                "host": "127.0.0.1",
                **{kind: free_port() for kind in ("http", "grpc", "kv")},
            },
        }
        worker = WorkerProcess(name, self._folder, settings, lambda: self.record(name))
        self.workers[name] = worker
        if start:
            worker.start()
        return worker

    def wait_ready(self) -> None:
        """Wait until every worker is ready and every ingress knows the others."""
        for worker in self.workers.values():
            worker.wait_ready()
        self.wait_connected()

    def heal(self) -> None:
        """Restart killed processes as they were started, and wait until all are ready."""
        for worker in self.workers.values():
            if not worker.is_alive:
                worker.restart(wait=False)
        self.wait_ready()

    def wait_connected(self) -> None:
        """Wait until every decode worker can use every prefill worker."""
        num_prefills = len(self._alive("prefill"))
        for worker in self._alive("decode"):
            has_all = partial(_uses, worker, num_prefills)
            wait_for(has_all, SETTLE_SECONDS, f"{worker.name} uses {num_prefills} prefill workers")

    def _alive(self, *roles: str) -> list[WorkerProcess]:
        return [
            worker
            for worker in self.workers.values()
            if worker.is_alive and worker.settings["role"] in roles
        ]

    # --- facts --------------------------------------------------------------------------------

    def records(self) -> dict[str, Json]:
        values = self.etcd.values(f"/pdcluster/test/{self.name}/workers/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in values.items()}

    def record(self, pod: str) -> Json | None:
        return self.records().get(pod)

    @contextmanager
    def drained_by_command(self, *pods: str) -> Iterator[None]:
        """Their drain commands are there within the block; a test may withdraw them
        before its end.
        """
        try:
            for pod in pods:
                self.command(pod, drain=True)
            yield
        finally:
            for pod in pods:
                self.command(pod, drain=False)

    def command(self, pod: str, *, drain: bool) -> None:
        key = f"/pdcluster/test/{self.name}/commands/{pod}"
        if drain:
            self.etcd.put(key, "drain")
        else:
            self.etcd.delete(key)

    def command_role(self, pod: str, role: str | None) -> None:
        """None = that of its pod."""
        key = f"/pdcluster/test/{self.name}/commands/{pod}/role"
        if role is not None:
            self.etcd.put(key, role)
        else:
            self.etcd.delete(key)

    def wait_role(self, pod: str, role: str) -> None:
        """Wait until its record in etcd says that it is ready in that role."""

        def has_role() -> bool:
            record = self.record(pod)
            return record is not None and (record["role"], record["state"]) == (role, "ready")

        wait_for(has_role, SETTLE_SECONDS, lambda: f"{pod} is no {role} worker: {self.record(pod)}")

    def wait_state(self, pod: str, *states: str) -> None:
        """Wait until the worker's record in etcd says one of these."""

        def state() -> str:
            return str((self.record(pod) or {"state": "absent"})["state"])

        wait_for(
            lambda: state() in states,
            SETTLE_SECONDS,
            lambda: f"{pod} is {state()}, not {' or '.join(states)}",
        )

    def wait_settled(self) -> None:
        """Wait until no worker holds a block and nothing waits, as every test must leave it; check
        the logs too.
        """
        for worker in self._alive("prefill", "decode", "mixed"):
            wait_for(partial(is_settled, worker), SETTLE_SECONDS, partial(_holdings, worker))
        for worker in self.workers.values():
            errors = worker.unhandled_errors()
            assert not errors, f"{worker.name} logged {errors}"

    def logs(self) -> dict[str, str]:
        return {worker.name: worker.log_tail() for worker in self.workers.values()}


NewCluster = Callable[[str], Cluster]


@dataclass(frozen=True)
class Pair:
    """A cluster of one prefill and one decode worker."""

    cluster: Cluster
    prefill: WorkerProcess
    decode: WorkerProcess


def is_settled(worker: WorkerProcess) -> bool:
    """Return whether every block is free or cached, and no request is left."""
    metrics, total = worker.metrics(), worker.settings["engine"]["numBlocks"]
    blocks = metrics.by_label("kv_blocks", "state")
    num_requests = sum(
        metrics.value(name)
        for name in ("num_requests_running", "num_requests_waiting", "prefill_queue_requests")
    )
    return blocks.get("free", 0) + blocks.get("cached", 0) == total and num_requests == 0


def _uses(decode: WorkerProcess, num_prefills: int) -> bool:
    return decode.metrics().value("peers", role="prefill", state="ready") == num_prefills


def _holdings(worker: WorkerProcess) -> str:
    return f"{worker.name} still holds blocks: {worker.blocks()}"
