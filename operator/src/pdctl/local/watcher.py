"""Polls process and etcd record of every worker a few times a second, and makes its state of both.

Reads instead of an etcd watch: there are few keys, and a read needs no care after an outage, in
which the last records stay.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdcluster_api.discovery.etcd import RegisteredWorker, read_workers
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import Previous, WorkerDisaggregation
from pdcluster_api.plan.status.disaggregating import DisaggregationReports, disaggregating
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.plan import LocalPlan
from pdctl.local.processes import ManagedProcess
from pdctl.local.run_directory import RunSettings

_STARTING_SECONDS = 0.2
_STEADY_SECONDS = 1.0


@dataclass(frozen=True)
class Row:
    """One worker.

    state:     starting, ready, unregistered (running without a record in etcd), draining,
               drained, restarting, failed or stopped
    addresses: host:port of http, grpc and kv; empty until registered
    """

    name: str
    role: str
    pool: str
    state: str
    pid: int | None
    num_restarts: int
    log: Path
    addresses: Mapping[str, str] = field(default_factory=dict)
    disaggregation: WorkerDisaggregation | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class RestartLedger:
    """The starts of each process at which an engine id was first seen; starts count from 1."""

    def __init__(self, left_over: Mapping[str, RegisteredWorker]) -> None:
        """left_over: records of an earlier run."""
        self._starts: dict[str, dict[str, int]] = {
            name: {record.engine_id: 0} for name, record in left_over.items()
        }

    def current(
        self, name: str, record: RegisteredWorker | None, start: int
    ) -> RegisteredWorker | None:
        """The record if it was first seen at this start of its process, else None."""
        # none, or one whose engine has not loaded: it says "starting" in any life
        if record is None or not record.engine_id:
            return record
        return (
            record
            if self._starts.setdefault(name, {}).setdefault(record.engine_id, start) == start
            else None
        )

    def has_announced(self, name: str, start: int) -> bool:
        return start in self._starts.get(name, {}).values()


def make_rows(
    workers: Sequence[tuple[str, str, ManagedProcess]],
    records: Mapping[str, RegisteredWorker],
    ledger: RestartLedger,
) -> tuple[Row, ...]:
    return tuple(
        _row(role, pool, managed, records.get(managed.launch.name), ledger)
        for role, pool, managed in workers
    )


def _row(
    role: str,
    pool: str,
    managed: ManagedProcess,
    found: RegisteredWorker | None,
    ledger: RestartLedger,
) -> Row:
    name = managed.launch.name
    record = ledger.current(name, found, managed.num_starts)
    return Row(
        name=name,
        role=role,
        pool=pool,
        state=_state(managed, record, has_announced=ledger.has_announced(name, managed.num_starts)),
        pid=managed.pid,
        num_restarts=max(0, managed.num_starts - 1),
        log=managed.launch.log,
        addresses=record.addresses if record and managed.phase == "running" else {},
        disaggregation=record.disaggregation if record and managed.phase == "running" else None,
    )


def _state(managed: ManagedProcess, record: RegisteredWorker | None, *, has_announced: bool) -> str:
    if managed.phase == "waiting":
        return "restarting" if managed.num_starts else "starting"
    if managed.phase != "running":
        return managed.phase
    if record is not None:
        return record.state
    return "unregistered" if has_announced else "starting"


class Watcher:
    """`changed` gets all rows when one differs; `all_ready` is set once all workers are ready.

    Where `changed` cannot write, `echo` gets that once, and each next poll tries again.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        changed: Callable[[Sequence[Row]], None],
        echo: Callable[[str], None],
    ) -> None:
        self.all_ready = asyncio.Event()
        self._endpoints = endpoints
        self._prefix = prefix
        self._changed = changed
        self._echo = echo
        self._is_unwritten = False
        self._records: Mapping[str, RegisteredWorker] = {}
        self._ledger = RestartLedger({})
        self._rows: tuple[Row, ...] = ()

    async def prime(self) -> None:
        """Read records of an earlier run, before any process starts.

        Raises EtcdUnreachableError.
        """
        self._ledger = RestartLedger(await read_workers(self._endpoints, self._prefix))

    async def run(self, workers: Sequence[tuple[str, str, ManagedProcess]]) -> None:
        """workers: (role, pool, process) of each."""
        while True:
            await self.refresh()
            self.poll(workers)
            await asyncio.sleep(_STEADY_SECONDS if self.all_ready.is_set() else _STARTING_SECONDS)

    def poll(self, workers: Sequence[tuple[str, str, ManagedProcess]]) -> None:
        rows = make_rows(workers, self._records, self._ledger)
        if rows != self._rows or self._is_unwritten:
            self._rows = rows
            self.report()
        if all(row.is_ready for row in rows):
            self.all_ready.set()

    def report(self) -> None:
        try:
            self._changed(self._rows)
        except OSError as e:
            if not self._is_unwritten:
                self._echo(f"cannot write the state: {e}; the cluster goes on: free some space")
            self._is_unwritten = True
        else:
            self._is_unwritten = False

    def http_address(self, name: str) -> str:
        """As host:port, of a ready worker."""
        return next(row.addresses["http"] for row in self._rows if row.name == name)

    async def refresh(self) -> None:
        """Keeps the old records when etcd does not answer."""
        try:
            self._records = await read_workers(self._endpoints, self._prefix)
        except EtcdUnreachableError:
            return  # its own process says so when it is ours; workers that know each other go on


def make_state(
    cluster: PDCluster,
    plan: LocalPlan,
    settings: RunSettings,
    etcd_pid: int | None,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """etcd_pid: None where the etcd is not ours."""
    placement = cluster.spec.placement
    return {
        "name": cluster.metadata.name,
        "namespace": cluster.metadata.namespace,
        "revision": plan.revision,
        "pid": os.getpid(),
        "model": cluster.spec.model.name,
        "ingress": plan.ingress.name,
        "etcd": {"endpoints": list(settings.etcd_endpoints), "pid": etcd_pid},
        "certificates": {
            "ca": str(settings.certificates.ca),
            "certificate": str(settings.certificates.certificate),
            "key": str(settings.certificates.key),
        },
        "policy": str(settings.run.policy),
        "minTransferGBps": placement.min_transfer_gbps if placement else None,
        "disaggregation": disaggregation_of(cluster, rows),
        "workers": [_worker(row) for row in rows],
    }


def _worker(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "role": row.role,
        "pool": row.pool,
        "state": row.state,
        "pid": row.pid,
        "restarts": row.num_restarts,
        "log": str(row.log),
        **{kind: row.addresses.get(kind) for kind in ("http", "grpc", "kv")},
    }


def rows_of(state: Mapping[str, Any]) -> list[Row]:
    """Rows of a state that another pdctl wrote; none where its folder is gone."""
    return [
        Row(
            name=worker["name"],
            role=worker["role"],
            pool=worker["pool"],
            state=worker["state"],
            pid=worker["pid"],
            num_restarts=worker["restarts"],
            log=Path(worker["log"]),
            addresses={kind: worker[kind] for kind in ("http", "grpc", "kv") if worker.get(kind)},
        )
        for worker in state.get("workers", ())
    ]


def disaggregation_of(cluster: PDCluster, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The condition and its figures; None for mixed workers."""
    if PREFILL not in cluster.spec.roles.present():
        return None
    threshold = cluster.spec.prefill_length_threshold
    found = disaggregating(_reports(rows), Previous({}), threshold)
    if found.condition is None:
        return None
    condition = found.condition
    words = {"status": condition.status, "reason": condition.reason, "message": condition.message}
    return {**words, **found.status}


class DisaggregationReporter:
    """Reports once when prefill and decode stop working together, and once when they resume."""

    def __init__(self, cluster: PDCluster, echo: Callable[[str], None]) -> None:
        self._cluster, self._echo = cluster, echo
        self._reported: str | None = None

    def show(self, rows: Sequence[Row]) -> None:
        found = disaggregation_of(self._cluster, rows)
        if found is None or found["status"] == "Unknown":
            return
        reason = found["reason"] if found["status"] == "False" else None
        if reason != self._reported:
            self._reported = reason
            self._echo(f"{self._cluster.metadata.name}: {found['message']}")


def _reports(rows: Sequence[Row]) -> DisaggregationReports:
    prefill = [row for row in rows if row.role == PREFILL]
    reports = {row.name: row.disaggregation for row in rows if row.disaggregation is not None}
    return DisaggregationReports(
        decode={
            row.name: reports[row.name]
            for row in rows
            if row.role != PREFILL and row.name in reports
        },
        prefill={row.name: reports[row.name] for row in prefill if row.name in reports},
        prefill_pods=frozenset(row.name for row in prefill),
        num_prefill_ready=sum(row.is_ready for row in prefill),
    )
