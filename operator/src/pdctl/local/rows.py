"""State of each worker now: its process beside its record in etcd.

Pure.  A record outlives its worker by up to a lease, so one that was first seen
in an earlier life of the process says nothing about this one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdcluster_api.discovery.etcd import WorkerRecord
from pdcluster_api.plan.observed.state import Disaggregation
from pdctl.local.keeper import Keeper


@dataclass(frozen=True)
class Row:
    """One worker.

    state:     starting, ready, unregistered (it runs, but etcd has lost its record), draining,
               drained, restarting, failed or stopped
    addresses: host:port of http, grpc and kv; empty until it has announced them
    disaggregation: what its record says of it; None = nothing yet
    """

    name: str
    role: str
    pool: str
    state: str
    pid: int | None
    num_restarts: int
    log: Path
    addresses: Mapping[str, str] = field(default_factory=dict)
    disaggregation: Disaggregation | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether it takes requests."""
        return self.state == "ready"


class LifeLedger:
    """Engine ids by life of each process; lives count from 1."""

    def __init__(self, left_over: Mapping[str, WorkerRecord]) -> None:
        """left_over: records of an earlier run, found before any process was started."""
        self._lives: dict[str, dict[str, int]] = {
            name: {record.engine_id: 0} for name, record in left_over.items()
        }

    def current(self, name: str, record: WorkerRecord | None, life: int) -> WorkerRecord | None:
        """The record if it was first seen in this life of its process, else None."""
        # none, or one whose engine has not loaded: it says "starting" in any life
        if record is None or not record.engine_id:
            return record
        return (
            record
            if self._lives.setdefault(name, {}).setdefault(record.engine_id, life) == life
            else None
        )

    def has_announced(self, name: str, life: int) -> bool:
        """Return whether a loaded engine was ever announced in this life."""
        return life in self._lives.get(name, {}).values()


def make_rows(
    workers: Sequence[tuple[str, str, Keeper]],
    records: Mapping[str, WorkerRecord],
    ledger: LifeLedger,
) -> tuple[Row, ...]:
    """One row per (role, pool, keeper); `records` is by process name."""
    return tuple(
        _row(role, pool, keeper, records.get(keeper.launch.name), ledger)
        for role, pool, keeper in workers
    )


def _row(
    role: str, pool: str, keeper: Keeper, found: WorkerRecord | None, ledger: LifeLedger
) -> Row:
    name = keeper.launch.name
    record = ledger.current(name, found, keeper.num_lives)
    return Row(
        name=name,
        role=role,
        pool=pool,
        state=_state(keeper, record, has_announced=ledger.has_announced(name, keeper.num_lives)),
        pid=keeper.pid,
        num_restarts=max(0, keeper.num_lives - 1),
        log=keeper.launch.log,
        addresses=record.addresses if record and keeper.phase == "running" else {},
        disaggregation=record.disaggregation if record and keeper.phase == "running" else None,
    )


def _state(keeper: Keeper, record: WorkerRecord | None, *, has_announced: bool) -> str:
    if keeper.phase == "waiting":
        return "restarting" if keeper.num_lives else "starting"
    if keeper.phase != "running":
        return keeper.phase
    if record is not None:
        return record.state
    return "unregistered" if has_announced else "starting"
