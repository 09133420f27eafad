"""Worker records and drain commands of one etcd as last read, and since when each mismatch lasts. A
mismatch begins with a read that found it, and grows no older while etcd is away.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pdcluster_api.discovery.commands import Registered
from pdcluster_api.plan.observed.state import (
    WorkerDevice,
    WorkerDisaggregation,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_api.plan.status.disaggregating import digest
from pdcluster_api.plan.status.discovery import find_mismatches
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_schema.backoff import Backoff

# Between the reconcile that wants a pod to serve again and the end of its drain command. The pod
# may be terminating already, and the watch brings that later.
UNDRAIN_DELAY_SECONDS = 1.0


@dataclass
class DrainCommands:
    """Wanted commands, and those that are left over."""

    # per pod that should drain, the start of its drain
    _requested: dict[str, float] = field(default_factory=dict)
    # per pod with a command that should serve again, since when
    _spare: dict[str, float] = field(default_factory=dict)

    def ask(self, drain: Collection[str], commanded: Iterable[str], now: float) -> None:
        self._requested = {pod: self._requested.get(pod, now) for pod in drain}
        self._spare = {pod: self._spare.get(pod, now) for pod in commanded if pod not in drain}

    def learn(self, ages: Mapping[str, float], now: float) -> None:
        """Take over commands that were found, with the seconds since their start."""
        for pod, age in ages.items():
            self._requested.setdefault(pod, now - max(0.0, age))

    @property
    def is_any(self) -> bool:
        return bool(self._requested or self._spare)

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the start of each drain."""
        return {pod: now - since for pod, since in self._requested.items()}

    def missing(self, commanded: Collection[str], now: float) -> dict[str, float]:
        """Wanted commands that are not written, with the seconds since the start of the drain."""
        return {pod: age for pod, age in self.ages(now).items() if pod not in commanded}

    def removable(self, now: float) -> set[str]:
        return {pod for pod, since in self._spare.items() if now - since >= UNDRAIN_DELAY_SECONDS}


IDLE_POLL_SECONDS = 60.0  # Between two reads of workers without a mismatch

EXTERNAL_POLL_SECONDS = 15.0  # Between two reads of a given etcd, whether it answers or not

RETRY = Backoff(first=10.0, most=300.0)  # Problem of a managed etcd that did not answer


@dataclass
class KnownRecords:
    """The last answer of one etcd, and its times, by a monotonic clock."""

    target: EtcdTarget
    # time of the last answer or failure; None = not read yet, or to be read again
    at: float | None = None
    last: Registered | None = None
    error: str | None = None  # of the last read or command; None = it answered
    # no read answers.  One that was cut short for a reconcile, and a refused command, leave that as
    # it was: `Ready` would follow each of them, and the next whole read
    is_down: bool = True
    num_failures: int = 0
    commands: DrainCommands = field(default_factory=DrainCommands)
    # per pod, since when a record has no pod or a pod no record
    mismatched: dict[str, float] = field(default_factory=dict)
    is_away: bool = False  # unreachable since the last successful read; mismatch timers restart
    is_tracked: bool = False  # it is read between reconciles too
    reads: int = 0  # so far
    judged: int = 0  # those that `mismatched` is based on: a change since is no mismatch yet
    turn: int = 0  # counts reads and commands
    known_turn: int = 0  # turn of `last`, which no earlier read may overwrite

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn

    @property
    def has_result(self) -> bool:
        return self.last is not None or self.error is not None

    @property
    def retry_seconds(self) -> float:
        return EXTERNAL_POLL_SECONDS if self.target.is_external else RETRY.after(self.num_failures)

    @property
    def idle_seconds(self) -> float:
        if self.error is not None:
            return self.retry_seconds
        return EXTERNAL_POLL_SECONDS if self.target.is_external else IDLE_POLL_SECONDS

    @property
    def seen(self) -> tuple[object, ...]:
        """Everything of which a change enqueues the cluster."""
        return self.error, self.is_down, self._content()

    def _content(self) -> tuple[object, ...]:
        if self.last is None:
            return ()
        last = self.last
        disaggregation = digest(_disaggregation(last))
        states, devices = _states(last), _devices(last)
        return states, devices, frozenset(last.commands), disaggregation, last.is_full

    def has_mismatch(self, workloads: Iterable[WorkloadState]) -> bool:
        if self.error is not None or self.last is None:
            return False
        return bool(find_mismatches(_states(self.last), workloads))

    def answered(self, at: float, now: datetime) -> None:
        """Note a read that succeeded.  now: wall-clock time, by which commands hold theirs."""
        if self.is_away:
            self.mismatched = {}
        self.error, self.num_failures, self.at = None, 0, at
        self.is_away = self.is_down = False
        starts = self.last.commands if self.last else {}
        ages = {
            pod: (now - since).total_seconds() for pod, since in starts.items() if since is not None
        }
        self.commands.learn(ages, at)

    def failed(self, error: str, at: float, *, is_down: bool) -> None:
        self.error, self.at, self.is_away = error, at, True
        self.is_down = is_down
        self.num_failures += 1

    def records(self, workloads: Iterable[WorkloadState], now: float) -> WorkerRecords | None:
        """The last answer, or error, as a plan takes it; None = neither yet."""
        requested = self.commands.ages(now)
        if self.error is not None:
            return WorkerRecords(
                requested=requested, error=self.error, again_seconds=self.retry_seconds
            )
        if self.last is None:
            return None
        states, last = _states(self.last), self.last
        self._judge(find_mismatches(states, workloads), now)
        return WorkerRecords(
            states,
            frozenset(last.commands),
            requested,
            {pod: now - since for pod, since in self.mismatched.items()},
            devices=_devices(last),
            disaggregation=_disaggregation(last),
        )

    def _judge(self, mismatched: Iterable[str], now: float) -> None:
        """Keep since when each mismatch lasts; one that no read has shown is none yet."""
        is_new = self.reads != self.judged
        self.judged = self.reads
        self.mismatched = {
            pod: self.mismatched.get(pod, now)
            for pod in mismatched
            if is_new or pod in self.mismatched
        }


def _states(registered: Registered) -> dict[str, str]:
    return {pod: stored.record.state for pod, stored in registered.records.items()}


def _devices(registered: Registered) -> dict[str, WorkerDevice]:
    records = {pod: stored.record for pod, stored in registered.records.items()}
    return {pod: record.device for pod, record in records.items() if record.device is not None}


def _disaggregation(registered: Registered) -> dict[str, WorkerDisaggregation]:
    found = {pod: stored.record.disaggregation for pod, stored in registered.records.items()}
    return {pod: report for pod, report in found.items() if report is not None}
