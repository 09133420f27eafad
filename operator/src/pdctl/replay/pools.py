"""Simulated pools: workers by ordinal that start, serve, drain and go, as those of a StatefulSet
do.

There are nodes for every worker; only budget and bounds of the spec limit them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.schema.workload import PoolKey
from pdctl.replay.streams import Streams


class WorkerPhase(Enum):
    """State of one worker."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class SimulatedWorker:
    """One worker.

    since: when it came into its state, in seconds; streams: of a decode worker, the requests that
    it runs
    """

    ordinal: int
    state: WorkerPhase
    since: float
    streams: Streams = field(default_factory=Streams)

    def go(self, state: WorkerPhase, now: float) -> None:
        """Into another state."""
        self.state, self.since = state, now


@dataclass
class SimulatedPool:
    """One pool.

    speed: of its workers, over one of the role's first pool; replicas: what was last decided;
    gpus_per_replica: accelerators of each
    """

    role: str
    name: str
    gpu: str
    speed: float
    replicas: int
    gpus_per_replica: int = 1
    workers: list[SimulatedWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = [
            SimulatedWorker(ordinal, WorkerPhase.READY, 0.0) for ordinal in range(self.replicas)
        ]

    @property
    def key(self) -> PoolKey:
        """(role, pool)."""
        return self.role, self.name

    def ready(self) -> Sequence[SimulatedWorker]:
        """The workers that take new requests."""
        return self.having(WorkerPhase.READY)

    def having(self, state: WorkerPhase) -> Sequence[SimulatedWorker]:
        """The workers in a state, by ordinal."""
        return [worker for worker in self.workers if worker.state is state]

    def facts(self) -> PoolFacts:
        """As the operator would see it."""
        ready, ending = len(self.ready()), len(self.having(WorkerPhase.DRAINING))
        return PoolFacts(
            self.role,
            self.name,
            self.gpu,
            self.replicas,
            len(self.workers),
            ready,
            ending,
            gpus_per_replica=self.gpus_per_replica,
        )

    def scale(self, replicas: int, now: float) -> None:
        """Carry out a decision: the highest ordinals drain; a worker that drains is taken back
        before a new one starts.
        """
        self.replicas = replicas
        there = {worker.ordinal: worker for worker in self.workers}
        for ordinal in range(replicas):
            worker = there.setdefault(ordinal, SimulatedWorker(ordinal, WorkerPhase.STARTING, now))
            if worker.state is WorkerPhase.DRAINING:
                worker.go(WorkerPhase.READY, now)
        for ordinal, worker in list(there.items()):
            if ordinal >= replicas and worker.state is WorkerPhase.STARTING:
                del there[ordinal]
            elif ordinal >= replicas and worker.state is WorkerPhase.READY:
                worker.go(WorkerPhase.DRAINING, now)
        self.workers = [there[ordinal] for ordinal in sorted(there)]

    def pass_time(
        self, now: float, start_seconds: float, drain_timeout_seconds: float | None
    ) -> float:
        """Let workers become ready, and drained ones go.

        Returns the streams that a time limit cut.
        """
        cut = 0.0
        staying = []
        for worker in self.workers:
            if worker.state is WorkerPhase.STARTING and now - worker.since >= start_seconds:
                worker.go(WorkerPhase.READY, now)
            if worker.state is WorkerPhase.DRAINING and now > worker.since:
                is_late = (
                    drain_timeout_seconds is not None
                    and now - worker.since >= drain_timeout_seconds
                )
                if is_late or worker.streams.is_done:
                    cut += 0.0 if worker.streams.is_done else worker.streams.number
                    continue
            staying.append(worker)
        self.workers = staying
        return cut


def carry_out(pools: Iterable[SimulatedPool], replicas: Mapping[PoolKey, int], now: float) -> None:
    """Every pool to its decided size."""
    for pool in pools:
        pool.scale(replicas[pool.key], now)
