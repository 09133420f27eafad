"""All workers of a cluster behind one address: of the revision that serves, and in a roll out of
the new one too.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from random import Random

from pdcluster_api.plan.observed.state import Flipped
from pdcluster_schema.workload import PoolKey
from pdcluster_simulator.cluster import ClusterBuilder
from pdcluster_simulator.requests import SimulatedRequest
from pdcluster_simulator.revision_workers import RevisionWorkers
from pdcluster_simulator.rollout import RolloutFigures, SimulatedRollout
from pdcluster_simulator.workers import ClusterWorker


class Fleet:
    """replicas: workers that each pool should have"""

    def __init__(self, builder: ClusterBuilder, start_seconds: float) -> None:
        self.builder, self.queue = builder, builder.queue
        self.replicas = {pool.key: pool.replicas for pool in builder.model.pools}
        self.rollout: SimulatedRollout | None = None
        self.rollout_figures: RolloutFigures | None = None
        self._start_seconds = start_seconds
        self._now = RevisionWorkers(builder, start_seconds)
        self._draw = Random(f"service {builder.model.seed}")

    @property
    def revisions(self) -> tuple[RevisionWorkers, ...]:
        return (self._now,) if self.rollout is None else (self.rollout.old, self.rollout.new)

    @property
    def workers(self) -> Iterator[ClusterWorker]:
        return chain.from_iterable(each.cell.workers.values() for each in self.revisions)

    @property
    def is_settled(self) -> bool:
        return self.rollout is None and self._now.is_settled

    def of(self, key: PoolKey) -> list[ClusterWorker]:
        """Workers that live in a pool, whichever role they have."""
        return [worker for each in self.revisions for worker in each.of(key)]

    def served(self, key: PoolKey) -> list[ClusterWorker]:
        return [worker for each in self.revisions for worker in each.served(key)]

    def arrive(self, request: SimulatedRequest) -> None:
        """Clients' connections are spread over all pods that answer."""
        if self.rollout is None:
            self._now.cell.arrive(request)
            return
        cells = [each.cell for each in self.rollout.serving]
        weights = [len(cell.ingresses) for cell in cells]
        found = cells if not any(weights) else self._draw.choices(cells, weights)
        found[0].arrive(request)

    def begin_rollout(self, now: float) -> None:
        """All workers are to be of another revision.  now: of the trace"""
        builder = self.builder.of_revision("new")
        new = RevisionWorkers(builder, self._start_seconds)
        builder.cell.renew(builder.model.num_routers)
        if builder.model.spec.rollout_strategy == "Rolling":
            self._now.flip(None)
        self.rollout = SimulatedRollout(self._now, new, self.replicas, now)
        self.rollout_figures = self.rollout.figures

    def scale(self, replicas: Mapping[PoolKey, int], flipped: Flipped | None = None) -> None:
        self.replicas = dict(replicas)
        if self.rollout is not None:
            self.rollout.scale(self.replicas)
            return
        for key, number in self.replicas.items():
            self._now.scale(key, number)
        self._now.flip(flipped)

    def advance(self) -> int:
        """Take workers a round further; returns the requests that a drain's limit has cut."""
        limit = self.builder.model.spec.rollout.drain_timeout_seconds
        num_cut = sum(each.advance(limit) for each in self.revisions)
        rollout = self.rollout
        if rollout is not None:
            rollout.observe(self.replicas)
            if rollout.figures.seconds is not None:
                self._now, self.rollout = rollout.new, None
        return num_cut
