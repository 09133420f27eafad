"""The plan of one step while a scheduler makes it, and its outcome."""

from dataclasses import dataclass, field

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.order import num_uncomputed


@dataclass(slots=True)
class Schedule:
    """One step's plan.

    budget:   tokens that may still be scheduled.
    newly_running: got a seat in this step, for the first time or again.
    admitted: those of them that waited, and compute their prompt in this step.
    started:  those of them that were admitted from waiting for the first time.
    failed:   can never run, with the reason; nothing here holds or knows them any more.
    """

    budget: int
    items: dict[EngineRequest, Scheduled] = field(default_factory=dict)
    newly_running: list[EngineRequest] = field(default_factory=list)
    started: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    failed: list[tuple[EngineRequest, str]] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        """Batch that the runner is to execute; may be empty."""
        return Batch(tuple(self.items.values()))

    @property
    def progressed(self) -> bool:
        """True if the next schedule could differ from this one."""
        return bool(self.items or self.preempted or self.failed)

    def add(self, request: EngineRequest, limit: int | None = None) -> Scheduled:
        """Spend budget on as many of the request's tokens as it allows, `limit` at most."""
        most = self.budget if limit is None else min(self.budget, limit)
        num_tokens = min(num_uncomputed(request), most)
        item = self.items[request] = Scheduled.of(request, num_tokens)
        self.budget -= num_tokens
        return item
