"""One choice of a request on its way over the decode workers: legs, each on one worker.

Before the first token a leg that fails means another try elsewhere; after it the choice moves:
the next leg gets the prompt and what was made so far, apart, and goes on from there.  What the
client has is what it was sent here, so no position is ever said twice, whatever an ended leg
would still have said.  The closing of a leg gives its blocks back.  Which worker is best is the
ingress's choice, how often a choice moves is `routing.moving`'s rule.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from pdcluster_worker.dispatch.engines.client import (
    ENGINE_STALLED,
    OUT_OF_BLOCKS,
    EngineDiedError,
    EngineStalledError,
    ShortOfBlocksError,
)
from pdcluster_worker.dispatch.estimation import UnmeetableDeadlineError
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.moving import MoveReason, leg_id
from pdcluster_worker.routing.qos.slo import aged
from pdcluster_worker.routing.qos.tiers import PRIORITIES

_DEMOTED = "priority=low"
"""Entry in the losses of a request: see `dispatch.decode.quality`."""


class CalledOffError(PeerError):
    """A leg was ended here, because its worker drains and another takes the choice."""

    def __init__(self) -> None:
        super().__init__("the decode worker drains")


@dataclass(slots=True)
class Course:
    """Output of a choice so far, and the workers that made it.

    output:       tokens that were passed on.
    num_legs:     begun, the present one included.
    num_moves:    legs that were begun after the first token.
    failed:       keys of the workers that failed since the last token, `HERE` for this one.
    left:         the worker, if any, that would go on with it but was left; the last resort.
    moves_for:    what the present leg is for, until its first token.
    kv_holder:    pod of the worker that was left, for the next leg; empty = none has its KV.
    is_over:      its last token was passed on.
    clock:        seconds that only go forward; arrival_seconds: of it, from which deadlines count.
    """

    spec: RequestSpec
    prefill: PrefillMode
    clock: Callable[[], float] = time.monotonic
    arrival_seconds: float = 0.0
    output: list[int] = field(default_factory=list)
    num_legs: int = 0
    num_moves: int = 0
    failed: set[str] = field(default_factory=set)
    left: list[Peer | None] = field(default_factory=list)
    moves_for: MoveReason | None = None
    kv_holder: str = ""
    is_over: bool = False

    @property
    def has_begun(self) -> bool:
        """True if the client has received a token."""
        return bool(self.output)

    def so_far(self) -> RequestSpec:
        """The choice with what it has made."""
        return replace(self.spec, output=[*self.spec.output, *self.output])

    def next_leg(self) -> tuple[RequestSpec, PrefillMode]:
        """The request of the next leg, and where it is to be prefilled.

        A prefill that was forced to be remote has been: later ones go by the offload rule.
        Its deadline does not begin again.
        """
        spec = self.spec
        if self.num_legs:
            leg = leg_id(spec.request_id, self.num_legs)
            spec = replace(self.so_far(), request_id=leg, kv_holder=self.kv_holder, prefiller="")
            self.kv_holder = ""
        self.num_legs += 1
        is_later = self.has_begun and self.prefill == "remote"
        return aged(spec, self.clock() - self.arrival_seconds), "auto" if is_later else self.prefill

    def take(self, generated: Generated) -> Generated:
        """Note the next token, and return it as one of the choice's, whatever leg it is of."""
        token, is_first_leg = generated.token, self.num_legs == 1
        is_first = not self.output
        self.output.append(token.token_id)
        self.is_over = token.finish_reason is not None
        if generated.degraded:
            self.spec = _as_degraded(self.spec, generated.degraded)
        if self.failed:
            self.failed.clear()
        if is_first_leg:
            return generated
        token = replace(token, request_id=self.spec.request_id)
        if is_first:
            return replace(generated, token=token)
        return replace(
            generated,
            token=replace(token, queue_seconds=None, prefill_seconds=None),
            prefill=None,
        )


class Leg(AsyncIterator[Generated]):
    """A choice's run at a peer, which can be called off while its next token is waited for.

    open_legs: it is among these until it is closed.
    """

    def __init__(self, course: Course, peer: Peer, open_legs: "set[Leg]") -> None:
        self.course = course
        self.peer = peer
        self._tokens = peer.generate(*course.next_leg())
        self._open_legs = open_legs
        self._is_called_off = False
        self._waiting: asyncio.Task[object] | None = None
        open_legs.add(self)

    def call_off(self) -> None:
        """End it at the next token, or now while none has come; again is a no-op."""
        if self._is_called_off:
            return
        self._is_called_off = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def __anext__(self) -> Generated:
        """Wait for the next token.

        Raises CalledOffError, and whatever the peer's stream raises.
        """
        if self._is_called_off:
            raise CalledOffError
        task = self._waiting = asyncio.current_task()
        assert task is not None, "a leg is run by a task"
        try:
            return await anext(self._tokens)
        except asyncio.CancelledError:
            if not self._is_called_off or task.uncancel():
                raise
            raise CalledOffError from None
        finally:
            self._waiting = None

    async def aclose(self) -> None:
        """End the call of the peer."""
        self._open_legs.discard(self)
        await self._tokens.aclose()


def _as_degraded(spec: RequestSpec, lost: Iterable[str]) -> RequestSpec:
    """The request as its worker runs it: a bound or a priority that was lowered there holds on the
    next one too.

    >>> from pdcluster_worker.messages.requests import Sampling
    >>> spec = RequestSpec("r", [1], Sampling(max_tokens=100, seed=1, min_tokens=50))
    >>> lowered = _as_degraded(spec, ["prefill=local", "max_tokens=20", "priority=low"])
    >>> lowered.sampling.max_tokens, lowered.sampling.min_tokens, lowered.priority
    (20, 20, 100)
    """
    for what in lost:
        name, _, value = what.partition("=")
        if name == "max_tokens":
            spec = replace(spec, sampling=spec.sampling.capped(int(value)))
        elif what == _DEMOTED:
            spec = replace(spec, priority=PRIORITIES["low"])
    return spec


def reason_of(error: PeerError | RequestError) -> MoveReason | None:
    """Reason to move a request that ended so to another worker; None = the request itself is at
    fault.
    """
    if isinstance(error, CalledOffError):
        return "draining"
    if isinstance(error, PeerError | EngineDiedError):
        return "lost"
    if error.status != _UNAVAILABLE:
        return None
    if error.code == ENGINE_STALLED:
        return "stalled"
    if error.code == OUT_OF_BLOCKS:
        return "preempted"
    return "draining" if error.code == "draining" else "lost"


_UNAVAILABLE = 503  # draining, full or its engine dead: another worker may well serve the request


def is_engines(error: Exception) -> bool:
    """Return whether a request ended because of an engine of this worker, not because of itself."""
    return isinstance(
        error, EngineDiedError | EngineStalledError | ShortOfBlocksError | UnmeetableDeadlineError
    )
