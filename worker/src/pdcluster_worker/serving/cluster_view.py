"""The cluster as this ingress worker sees it: members and their load now, conditions of the
PDCluster where an operator wrote them, counts of the last hour.

Counts are kept here and nowhere else: they begin with this worker, and end with it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.config.worker import Identity, WorkerConfig
from pdcluster_worker.messages.overview import (
    ClusterOverview,
    ConditionsOverview,
    History,
    KvTier,
    WorkerFigures,
    WorkerOverview,
)
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.serving.worker_context import WorkerContext

PERIOD_SECONDS = 30
NUM_PERIODS = 120
"""An hour, with the period that has not ended: some kilobytes, of which a page draws each as two or
three pixels.
"""

_Prefills = tuple[int, int]
"""Remote and local ones."""


@dataclass(frozen=True, slots=True)
class _Sample:
    ready: dict[str, int]
    prefills: _Prefills


@dataclass(slots=True)
class _Counted:
    """age: samples since it was seen."""

    engine_id: str
    prefills: _Prefills
    age: int = 0


class ClusterView:
    def __init__(
        self, config: WorkerConfig, identity: Identity, worker: WorkerContext, directory: Directory
    ) -> None:
        self._config = config
        self._identity = identity
        self._worker = worker
        self._directory = directory
        self.conditions: Callable[[], ConditionsOverview | None] = lambda: None
        self._samples: deque[_Sample] = deque(maxlen=NUM_PERIODS - 1)
        # by pod, of the last hour; all that this worker counts is of its own life
        self._counted = {identity.pod: _Counted("", (0, 0))}

    async def run(self) -> None:
        while True:
            for _ in range(PERIOD_SECONDS):
                await asyncio.sleep(1)
                self.notice()
            self.sample()

    def notice(self) -> None:
        """Note the counts that workers have when they are first seen."""
        for record in self._directory.members():
            if record.pod not in self._counted and (now := _prefills(self._seen(record))):
                self._counted[record.pod] = _Counted(record.engine_id, now)

    def sample(self) -> None:
        """End a period."""
        sample, counted = self._period()
        self._samples.append(sample)
        self._counted |= counted
        for pod, last in list(self._counted.items()):
            last.age += 1
            if last.age > NUM_PERIODS:
                del self._counted[pod]

    def _period(self) -> tuple[_Sample, dict[str, _Counted]]:
        """The period that has not ended yet, and what its workers have counted by now."""
        ready: dict[str, int] = {}
        counted: dict[str, _Counted] = {}
        grown = [(0, 0)]
        for record in self._directory.members():
            worker = self._seen(record)
            ready[worker.role] = ready.get(worker.role, 0) + (worker.state == "ready")
            if (now := _prefills(worker)) is not None:
                before, now = self._growth(record, now)
                counted[record.pod] = _Counted(record.engine_id, now)
                grown.append((now[0] - before[0], now[1] - before[1]))
        remote, local = (sum(counts) for counts in zip(*grown, strict=True))
        return _Sample(ready, (remote, local)), counted

    def _growth(self, record: WorkerRecord, now: _Prefills) -> tuple[_Prefills, _Prefills]:
        """A pod's last value and the present one.  Another engine of the pod counts from 0; of a
        pod that is new here it is not known when its counts were made.
        """
        last = self._counted.get(record.pod)
        before = now if last is None else (0, 0)
        if last is not None and last.engine_id == record.engine_id:
            before = last.prefills
            now = max(before[0], now[0]), max(before[1], now[1])
        return before, now

    def overview(self, problem: str | None) -> ClusterOverview:
        config = self._config
        return ClusterOverview(
            namespace=self._identity.namespace,
            cluster=config.cluster,
            revision=config.revision,
            model=config.model.name,
            pod=self._identity.pod,
            role=self._worker.role,
            problem=problem,
            workers=self._workers(),
            history=self._history(),
            conditions=self.conditions(),
        )

    def _workers(self) -> list[WorkerOverview]:
        return [self._seen(record) for record in self._directory.members()]

    def _seen(self, record: WorkerRecord) -> WorkerOverview:
        worker, note = self._worker, ""
        load: WorkerLoad | None = None
        if record.pod == self._identity.pod:
            load = None if worker.engineless else worker.load()
            state = worker.state if load is None else load.state
        else:
            peer = self._directory.peer(record.pod)
            state = record.state if record.engine_id else "starting"
            if peer is not None and peer.state == "ready":
                load = peer.load
                state = load.state if state == "ready" else state
            elif peer is not None and state == "ready":
                state, note = peer.state, self._directory.refused(record.role).get(record.pod, "")
        device = "" if record.device is None else record.device.name
        figures = None if load is None else _figures(load)
        return WorkerOverview(record.pod, record.role, record.pool, state, note, device, figures)

    def _history(self) -> History:
        samples = [*self._samples, self._period()[0]]
        roles = sorted({role for sample in samples for role in sample.ready})
        return History(
            PERIOD_SECONDS,
            {role: [sample.ready.get(role, 0) for sample in samples] for role in roles},
            [sample.prefills[0] for sample in samples],
            [sample.prefills[1] for sample in samples],
        )


def _figures(load: WorkerLoad) -> WorkerFigures:
    return WorkerFigures(
        load.num_running,
        load.num_waiting + load.credit_queue_requests,
        load.used_blocks,
        load.total_blocks,
        load.num_transfers,
        load.kv_bytes,
        load.remote_prefills,
        load.local_prefills,
        [KvTier(tier.name, tier.stored, tier.num_slots) for tier in load.tiers],
    )


def _prefills(worker: WorkerOverview) -> _Prefills | None:
    """None = it has not said: all is 0 until a new connection reports."""
    figures = worker.figures
    if figures is None:
        return None
    prefills = figures.remote_prefills, figures.local_prefills
    return prefills if figures.total_blocks or any(prefills) else None
