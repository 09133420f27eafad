"""Interface of all schedulers."""

from typing import Protocol

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.block_policy import BlockPolicy
from pdcluster_worker.engine.scheduler.schedule import Schedule


class Scheduler(Protocol):
    """Requests that wait for a seat or hold one, and the plan of each step.

    Requests that receive KV or send it are not here.

    waiting: hold no blocks.
    ready:   hold received KV and wait for a seat only.
    running: hold a seat.
    num_preemptions: since the start.
    block_policy: the blocks that a request takes when it comes in.
    """

    waiting: list[EngineRequest]
    ready: list[EngineRequest]
    running: list[EngineRequest]
    num_preemptions: int
    block_policy: BlockPolicy

    @property
    def num_requests(self) -> int:
        """Requests that could be scheduled, now or later."""
        ...

    @property
    def computing(self) -> list[EngineRequest]:
        """Running requests with a token for the next step: all but those whose last one is under
        way, or that wait for it.
        """
        ...

    @property
    def is_prefilling(self) -> bool:
        """True if a running request has prompt left to compute."""
        ...

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed by requests that are not past their prefill."""
        ...

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that newcomers from outside must leave to the requests that are here."""
        ...

    @property
    def preemption_victim(self) -> EngineRequest | None:
        """The next running request that makes way for a waiting one of higher priority; None where
        none does.
        """
        ...

    def preempt_for_priority(self) -> None:
        """Return all of these to the waiting queue, between two steps."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request that holds no blocks, new or PREEMPTED."""
        ...

    def add_ready(self, request: EngineRequest) -> None:
        """Queue a request whose KV is in its blocks."""
        ...

    def remove(self, request: EngineRequest) -> None:
        """Forget a request, wherever it stands; its blocks stay its own.

        Unknown requests are a no-op.
        """
        ...

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; every scheduled token has its block when this returns.

        Either makes progress or changes nothing.
        admit: False = no waiting request is admitted in this step; nothing else changes.
        """
        ...

    def completed(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long, from its schedule to its last token."""
        ...
