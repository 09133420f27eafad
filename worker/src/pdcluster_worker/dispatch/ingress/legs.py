"""Runs the legs of the choices that came to this worker, and decides what follows one that failed.

Guarantees: an error that is the request's own is not tried again; a leg has been closed before the
next one begins; a choice that was taken from a worker which would go on with it goes back there
when no other worker takes it.  `dispatch.ingress.course` holds what a choice has made.
"""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pdcluster_worker.dispatch.decode.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.engines.client import EngineDiedError
from pdcluster_worker.dispatch.ingress.choosing import HERE, Choosing, key_of, name_of
from pdcluster_worker.dispatch.ingress.course import (
    CalledOffError,
    Course,
    Leg,
    is_engines,
    reason_of,
)
from pdcluster_worker.dispatch.ingress.racing import Race, Raced
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.moving import MoveOutcome, MoveReason, has_room, may_move
from pdcluster_worker.streams import Mapped, Reader, Stream

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Route:
    """Start of the choices of one prompt.

    where:        the worker of the last leg that began, where the prompt is cached; None = this
                  one.
    may_run_here: a drain that begins later lets the request go on.
    race:         that the first choice runs, of `where` and another worker; None = there is none.
    """

    where: Peer | None
    may_run_here: bool
    race: Race | None = None


class Legs:
    """One per ingress.  decodes: peers that take new work."""

    def __init__(
        self,
        worker: Worker,
        here: DecodeDispatcher,
        decodes: Callable[[], list[Peer]],
        choosing: Choosing,
    ) -> None:
        self._worker = worker
        self._here = here
        self._decodes = decodes
        self._choosing = choosing
        self._at_peers: set[Leg] = set()

    def follow(self, course: Course, reader: Reader[Generated]) -> None:
        """Have a first leg's tokens on this worker taken by `reader`, and kept in its course."""
        self._here.follow(course.spec.request_id, Mapped(course.take, reader))

    def on_change(self) -> None:
        """Call off what runs on workers that drain, as far as others take it."""
        for leg in tuple(self._at_peers):
            if leg.peer.is_draining and self._may_leave(leg.course, leg.peer):
                leg.call_off()

    def _may_leave(self, course: Course, peer: Peer) -> bool:
        if not may_move(self._worker.policy.moving, course.num_moves):
            return False
        if self._is_bound(course, peer):
            return False
        others = [peer for peer in self._decodes() if peer.key not in course.failed]
        return self._worker.takes_new or bool(others)

    def _is_bound(self, course: Course, where: Peer | None) -> bool:
        """Return whether no other worker can go on with a choice of `where`: it follows a grammar
        that their engines would begin again.  All engines of a revision are of one type.
        """
        if course.spec.sampling.constraint is None or not course.has_begun:
            return False
        facts = self._worker.engine_ready if where is None else where
        return facts.restarts_grammar

    # --- a leg --------------------------------------------------------------------------------

    def begin(self, course: Course, where: Peer | None, race: Race | None) -> Stream[Generated]:
        """Begin a leg; with a race both of its legs, of which one goes on."""
        if race is None:
            return self._leg(course, where)
        return Raced(
            self._worker, race, course, [self._leg(course, entrant) for entrant in race.entrants]
        )

    def _leg(self, course: Course, peer: Peer | None) -> Stream[Generated]:
        return (
            self._here.run(*course.next_leg())
            if peer is None
            else Leg(course, peer, self._at_peers)
        )

    # --- the one after it ---------------------------------------------------------------------

    def next_worker(
        self, course: Course, route: Route, where: Peer | None, error: PeerError | RequestError
    ) -> Peer | None:
        """Choose the worker of the leg after one that ended at `where`; None is this one.

        Raises RequestError if there is none.
        """
        reason = reason_of(error)
        if reason is None or (where is None and not is_engines(error)):
            raise error
        was_here = HERE in course.failed
        if isinstance(error, CalledOffError) or reason == "preempted":
            course.left = [where]
        else:
            course.failed.add(key_of(where))
        logger.warning(
            "leg ended early request=%s at=%s tokens=%d reason=%s",
            *(course.spec.request_id, name_of(where), len(course.output), error),
        )
        if course.has_begun:
            following = self._move(course, where, reason, error)
            if isinstance(error, CalledOffError) and where is not None:
                course.kv_holder = where.key
        else:
            may_be_here = not was_here and (where is None or route.may_run_here)
            full = self._full(course, where) if reason == "preempted" else frozenset()
            following = self._again(course, error, may_be_here, full)
        _note(course, reason, where, following)
        return following

    def _again(
        self,
        course: Course,
        error: PeerError | RequestError,
        may_be_here: bool,
        full: frozenset[str],
    ) -> Peer | None:
        """Another try: the client has seen nothing.  full: workers without room for it."""
        if isinstance(error, EngineDiedError):
            raise error  # a request that kills its engine kills one
        may_be_here = may_be_here or (self._worker.takes_new and HERE not in course.failed)
        if may_be_here and HERE not in full and self._worker.engines.problem is None:
            return None
        peer = self._choose(course, may_be_here=False, full=full)
        if peer is not None:
            return peer
        for left in self._last_resort(course):
            return left
        raise error if isinstance(error, RequestError) else self._worker.refusal() from error

    def _move(
        self,
        course: Course,
        where: Peer | None,
        reason: MoveReason,
        error: PeerError | RequestError,
    ) -> Peer | None:
        """A leg from the last token on."""
        if where is None and isinstance(error, EngineDiedError) and self._worker.engines.problem:
            raise error  # this process is about to end
        if self._is_bound(course, where):
            self.count(reason, "refused")
            raise _lost(where, error, _BOUND) from error
        reason = course.moves_for or reason
        is_allowed = may_move(self._worker.policy.moving, course.num_moves)
        full = self._full(course, where) if reason == "preempted" else frozenset()
        may_be_here = is_allowed and self._worker.takes_new and HERE not in full
        following = self._choose(course, may_be_here, full) if is_allowed else None
        if following is not None or may_be_here:
            course.moves_for = reason
        else:
            self.count(reason, "nowhere" if is_allowed else "refused")
            last = self._last_resort(course)
            if not last and not (is_allowed and self._is_up(course)):
                raise _lost(where, error) from error
            following = last[0] if last else None
        course.num_moves += 1
        return following

    def _full(self, course: Course, where: Peer | None) -> frozenset[str]:
        """Workers without room for a request that was preempted where it was."""
        num_tokens = len(course.spec.prompt) + len(course.spec.output) + len(course.output)
        needed = self._worker.num_blocks(num_tokens)
        peers = [peer for peer in self._decodes() if not has_room(peer.load.free_blocks, needed)]
        here = [] if has_room(self._worker.load().free_blocks, needed) else [HERE]
        return frozenset([*(peer.key for peer in peers), *here, key_of(where)])

    def _choose(
        self, course: Course, may_be_here: bool, full: frozenset[str] = frozenset()
    ) -> Peer | None:
        try:
            return self._choosing.choose(course.so_far(), may_be_here, course.failed, full)
        except RequestError as e:  # it names its worker
            logger.warning("stays request=%s reason=%s", course.spec.request_id, e)
            return None

    def _last_resort(self, course: Course) -> list[Peer | None]:
        """The worker that it was taken from, while that would go on with it; or none."""
        return [left for left in course.left if self._would_go_on(course, left)]

    def _would_go_on(self, course: Course, left: Peer | None) -> bool:
        if left is None:
            return self._is_up(course)
        return left.key not in course.failed and (left.is_draining or left in self._decodes())

    def _is_up(self, course: Course) -> bool:
        """Return whether this worker can run the choice, draining or not, where no other can."""
        is_up = self._worker.engines.problem is None and not self._worker.has_ended
        return is_up and HERE not in course.failed

    def count(self, reason: MoveReason, outcome: MoveOutcome) -> None:
        """Count a choice that has left its worker."""
        self._worker.metrics.request_moves.labels(reason, outcome).inc()


class ChoiceRun(AsyncIterator[Generated]):
    """All tokens of one choice, on as many workers as it takes.  Raises RequestError."""

    def __init__(self, legs: Legs, course: Course, route: Route) -> None:
        self._legs = legs
        self._course = course
        self._route = route
        self._leg: Stream[Generated] | None = None
        self._where: Peer | None = None
        self._race: Race | None = None

    async def __anext__(self) -> Generated:
        if self._leg is None:
            self._begin(self._route.where)
        while True:
            assert self._leg is not None
            try:
                return self._taken(await anext(self._leg))
            except (PeerError, RequestError) as e:
                await self._leg.aclose()
                if self._course.is_over:
                    raise StopAsyncIteration from None  # the client has all of it
                self._begin(self._next(e))

    async def aclose(self) -> None:
        """End the leg that runs."""
        if self._leg is not None:
            await self._leg.aclose()

    def follow(self, reader: Reader[Generated]) -> None:
        """Have tokens taken by `reader` while the choice is where it began, alone and on this
        worker; others come from the stream as before.
        """
        if self._race is None and self._where is None and self._course.num_legs == 1:
            self._legs.follow(self._course, reader)

    def _begin(self, where: Peer | None) -> None:
        route = self._route
        self._where = where
        self._race, route.race = route.race, None
        self._leg = self._legs.begin(self._course, where, self._race)

    def _taken(self, generated: Generated) -> Generated:
        course = self._course
        if self._race is not None:
            self._route.where = self._race.where
        if course.moves_for is not None:
            self._legs.count(course.moves_for, "moved")
            course.moves_for = None
        return course.take(generated)

    def _next(self, error: PeerError | RequestError) -> Peer | None:
        where = self._where
        if self._race is not None:
            where = self._race.where
            self._course.failed |= self._race.failed
        self._route.where = self._legs.next_worker(self._course, self._route, where, error)
        return self._route.where


_BOUND = (
    "; a structured answer that has begun cannot go on at another worker with this type of engine: "
    "send the request again"
)


def _lost(where: Peer | None, error: PeerError | RequestError, advice: str = "") -> RequestError:
    if where is None and isinstance(error, RequestError):
        return error
    message = f"the decode worker of this request was lost: {error}{advice}"
    return RequestError(message, status=503, code="decode_worker_lost")


def _note(course: Course, reason: MoveReason, left: Peer | None, goes_to: Peer | None) -> None:
    name = "move" if course.has_begun else "again"
    facts = {"reason": reason, "left": name_of(left), "goes_to": name_of(goes_to)}
    note(name, tokens=len(course.output), moves=course.num_moves, **facts)
