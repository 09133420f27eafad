"""Interface of all schedulers."""

from typing import Protocol

from pdcluster_worker.engine.request import Request
from pdcluster_worker.engine.scheduler.rooms import Room
from pdcluster_worker.engine.scheduler.schedule import Schedule


class Scheduler(Protocol):
    """Requests that wait for a seat or hold one, and the plan of each step.

    Requests that receive KV or send it are not here.

    waiting: hold no blocks.
    ready:   hold received KV and wait for a seat only.
    running: hold a seat.
    num_preemptions: since the start.
    room:    the blocks that a request takes when it comes in.
    """

    waiting: list[Request]
    ready: list[Request]
    running: list[Request]
    num_preemptions: int
    room: Room

    @property
    def num_requests(self) -> int:
        """Requests that could be scheduled, now or later."""
        ...

    @property
    def computing(self) -> list[Request]:
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
    def displaced(self) -> Request | None:
        """The next running request that makes way for a waiting one of higher priority; None where
        none does.
        """
        ...

    def displace(self) -> None:
        """Return all of these to the waiting queue, between two steps."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request that holds no blocks, new or PREEMPTED."""
        ...

    def add_ready(self, request: Request) -> None:
        """Queue a request whose KV is in its blocks."""
        ...

    def remove(self, request: Request) -> None:
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
