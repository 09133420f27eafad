"""The workers of one revision as they start, drain and end.  They are a cell of their own, since
those of two revisions never pair.
"""

from collections.abc import Sequence

from pdcluster_api.plan.observed.state import Flipped
from pdcluster_schema.workload import PoolKey
from pdcluster_simulator.cluster import ClusterBuilder
from pdcluster_simulator.workers import ClusterWorker, WorkerState


class RevisionWorkers:
    """start_seconds: until a new worker is ready"""

    def __init__(self, builder: ClusterBuilder, start_seconds: float) -> None:
        self.builder, self.cell = builder, builder.cell
        self._start_seconds = start_seconds

    @property
    def is_settled(self) -> bool:
        """No worker starts or drains."""
        return all(each.is_ready for each in self.cell.workers.values())

    def of(self, key: PoolKey) -> list[ClusterWorker]:
        """Workers that live in a pool, whichever role they have."""
        return [each for each in self.cell.workers.values() if each.home == key]

    def served(self, key: PoolKey) -> list[ClusterWorker]:
        workers = self.cell.workers.values()
        return [each for each in workers if each.pool == key and each.is_ready]

    def scale(self, key: PoolKey, replicas: int) -> None:
        """The highest ordinals drain; draining workers are reused before new ones start."""
        workers = {each.ordinal: each for each in self.of(key)}
        changed = False
        for ordinal in range(replicas):
            worker = workers.get(ordinal)
            if worker is None:
                self.builder.add(key, ordinal, WorkerState.STARTING)
            elif worker.ends:
                self._resume(worker)
                changed = True
        for ordinal, worker in workers.items():
            if ordinal < replicas or worker.ends:
                continue
            worker.next_pool = None
            if worker.state is WorkerState.STARTING:
                self.cell.remove(worker)
                continue
            self._enter(worker, WorkerState.DRAINING)
            changed = True
        if changed:
            self._drain([*workers.values()])

    def flip(self, flipped: Flipped | None) -> None:
        """Workers drain before they take another role; one that is to keep its own goes on."""
        changed = []
        for worker in [*self.cell.workers.values()]:
            pool = worker.home
            if flipped and pool == flipped.home and worker.ordinal < flipped.workers:
                pool = flipped.to
            if worker.is_ready and pool != worker.pool:
                worker.next_pool = pool
                self._enter(worker, WorkerState.DRAINING)
                changed.append(worker)
            elif worker.next_pool is not None and pool == worker.pool:
                worker.next_pool = None
                self._resume(worker)
                changed.append(worker)
        if changed:
            self._drain(changed)

    def advance(self, limit: float | None) -> int:
        """Make workers ready and remove drained ones; returns the requests that were cut.

        limit: seconds that a drain may take
        """
        num_cut, changed = 0, False
        for worker in [*self.cell.workers.values()]:
            waited = self.cell.queue.now - worker.since
            if worker.state is WorkerState.STARTING and waited >= self._start_seconds:
                self._enter(worker, WorkerState.READY)
                changed = True
            elif worker.next_pool is not None:
                if waited > 0.0 and not worker.num_active:
                    self.builder.change_role(worker, worker.next_pool)
                    self._enter(worker, WorkerState.READY)
                    changed = True
            elif worker.state is WorkerState.DRAINING and waited > 0.0:
                is_late = limit is not None and waited >= limit
                if is_late and worker.num_active:
                    num_cut += self.cell.cut(worker)
                if is_late or not worker.num_active:
                    self.cell.remove(worker)
        if changed:
            self.cell.renew(self.builder.model.num_routers)
        return num_cut

    def _resume(self, worker: ClusterWorker) -> None:
        self._enter(worker, WorkerState.READY)
        if worker.ledger is not None:
            worker.ledger.resume()

    def _drain(self, workers: Sequence[ClusterWorker]) -> None:
        """Let the others know of those that drain."""
        self.cell.renew(self.builder.model.num_routers)
        for worker in workers:
            if worker.state is WorkerState.DRAINING and worker.ledger is not None:
                self.cell.remote.on_draining(worker)

    def _enter(self, worker: ClusterWorker, state: WorkerState) -> None:
        worker.state, worker.since = state, self.cell.queue.now
