"""The cluster as this ingress worker sees it: members and their load now, counts of the last hour.

Counts are kept here and nowhere else: they begin with this worker, and end with it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from pdcluster_worker.config.worker import Identity, WorkerConfig
from pdcluster_worker.messages.overview import (
    ClusterOverview,
    History,
    WorkerFigures,
    WorkerOverview,
)
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.serving.worker_context import WorkerContext

PERIOD_SECONDS = 30
NUM_PERIODS = 120
"""An hour: some kilobytes, of which a page draws each as two or three pixels."""

_Prefills = tuple[int, int]
"""Remote and local ones."""


@dataclass(frozen=True, slots=True)
class _Sample:
    ready: dict[str, int]
    prefills: _Prefills


class ClusterView:
    def __init__(
        self, config: WorkerConfig, identity: Identity, worker: WorkerContext, directory: Directory
    ) -> None:
        self._config = config
        self._identity = identity
        self._worker = worker
        self._directory = directory
        self._samples: deque[_Sample] = deque(maxlen=NUM_PERIODS)
        self._counted: dict[str, _Prefills] = {}  # by pod, at the last sample

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            self.sample()

    def sample(self) -> None:
        """End a period."""
        workers = self._workers()
        ready: dict[str, int] = {}
        for worker in workers:
            ready[worker.role] = ready.get(worker.role, 0) + (worker.state == "ready")
        counted = {
            each.pod: (each.figures.remote_prefills, each.figures.local_prefills)
            for each in workers
            if each.figures is not None
        }
        grown = [
            _growth(self._counted.get(pod, (0, 0)), now)
            for pod, now in counted.items()
            if pod in self._counted or self._samples
        ]
        known = {**self._counted, **counted}
        self._counted = {each.pod: known[each.pod] for each in workers if each.pod in known}
        self._samples.append(_Sample(ready, (sum(r for r, _ in grown), sum(n for _, n in grown))))

    def overview(self, problem: str | None) -> ClusterOverview:
        config = self._config
        return ClusterOverview(
            namespace=self._identity.namespace,
            cluster=config.cluster,
            revision=config.revision,
            model=config.model.name,
            pod=self._identity.pod,
            role=config.role,
            problem=problem,
            workers=self._workers(),
            history=self._history(),
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
        samples = self._samples
        roles = sorted({role for sample in samples for role in sample.ready})
        return History(
            PERIOD_SECONDS,
            {role: [sample.ready.get(role, 0) for sample in samples] for role in roles},
            [sample.prefills[0] for sample in samples],
            [sample.prefills[1] for sample in samples],
        )


def _growth(before: _Prefills, now: _Prefills) -> _Prefills:
    """A worker that has restarted counts from 0.

    >>> _growth((3, 5), (4, 5)), _growth((3, 5), (1, 0))
    ((1, 0), (1, 0))
    """
    if now[0] < before[0] or now[1] < before[1]:
        return now
    return now[0] - before[0], now[1] - before[1]


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
    )
