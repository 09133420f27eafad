"""Drain state machine of this worker: ready, draining, drained."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf

from pdcluster_worker.peers.records import WorkerState

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""Period of checks while a worker drains: what holds it lies in several rooms, and none of them
reports to the drain.
"""

UNSENT_CHECK_SECONDS = 0.5
"""The same while only clients hold it that read slowly, since asking the kernel costs more."""

FOLLOW_SECONDS = 5.0
"""Period of checks of clients while requests run.

A connection whose whole answer has stayed untaken since such a check is not waited for again.
"""

NOTICE_SECONDS = 15.0
"""Time until a Service knows of a drain by command: readiness fails after two probes of 5 s each,
and nodes follow a moment later.
"""

MOST_FAILURES = 90
"""So many looks in a row that fail, for 45 s, are the last."""

LAST_SECONDS = 3.0
"""Time before SIGKILL in which answers end with an error, and clients take it."""


class DrainController:
    """One per worker, which is ready at first.

    announce:      called with each state.
    grace_seconds: from `end` until the process is killed.
    """

    def __init__(
        self,
        num_holding: Callable[[], int],
        announce: Callable[[WorkerState], None],
        unacked: Callable[[], Awaitable[frozenset[str]]],
        grace_seconds: float = inf,
    ) -> None:
        self._grace_seconds = grace_seconds
        self.state: WorkerState = "ready"
        self._num_holding = num_holding
        self._announce = announce
        self._poll_unacked = unacked
        # what is left of the connections of the first look; None before it
        self._unacked: frozenset[str] | None = None
        self._is_answer_void = True
        self._num_failures = 0
        self._polled_seconds = -inf
        self._is_commanded = False
        self._requested_seconds = 0.0  # when the first of both commands came
        self._commanded_grace: float = inf
        self._is_ending = False
        self._ending_seconds = 0.0
        self._leaves_role = False
        self._polling: asyncio.Task[None] | None = None
        self._is_drained = asyncio.Event()

    @property
    def is_requested(self) -> bool:
        return self._is_commanded or self._is_ending or self._leaves_role

    @property
    def num_holding(self) -> int:
        """Requests and clients that a draining worker waits for; 0 while it does not drain."""
        return self._num_holding() + len(self._unacked or ()) if self.is_requested else 0

    @property
    def is_noticed(self) -> bool:
        """False while clients may be led here by a Service that does not know of the command."""
        since = asyncio.get_running_loop().time() - self._requested_seconds
        return self._is_ending or not self.is_requested or since >= NOTICE_SECONDS

    @property
    def seconds_left(self) -> float:
        """Time for requests to end by themselves; 0 or less = it is over, once the process ends."""
        if not self._is_ending:
            return inf
        grace = min(self._grace_seconds, self._commanded_grace)
        passed = asyncio.get_running_loop().time() - self._ending_seconds
        return grace - LAST_SECONDS - passed

    def command(self, present: bool, grace_seconds: float = inf) -> None:
        """The operator's key: present = drain, absent = serve.  grace_seconds: of a pod that has
        less of it than its template says.
        """
        self._commanded_grace = grace_seconds
        self._note_request(present)
        self._is_commanded = present
        self._request_stop()

    def leave_role(self, present: bool) -> None:
        """The worker is to have another role: it finishes the work of this one first."""
        self._note_request(present)
        self._leaves_role = present
        self._request_stop()

    def _note_request(self, present: bool) -> None:
        if present and not self.is_requested:
            self._requested_seconds = asyncio.get_running_loop().time()

    def end(self) -> None:
        """The process is to end; no command takes that back."""
        if not self._is_ending:
            self._ending_seconds = asyncio.get_running_loop().time()
        self._is_ending = True
        self._request_stop()

    def poll(self) -> None:
        """Bring the state up to date."""
        if not self.is_requested or self._num_holding():
            self._unacked, self._is_answer_void = None, True
        if not self.is_requested:
            self._num_failures = 0
        state: WorkerState = (
            "ready"
            if not self.is_requested
            else "drained"
            if self._unacked == frozenset()
            else "draining"
        )
        if state != self.state:
            self.state = state
            self._announce(state)
        if state == "drained":
            self._is_drained.set()
        else:
            self._is_drained.clear()

    async def drained(self) -> None:
        """Return while nothing holds the worker; valid until the caller next waits."""
        self.poll()
        while self.state != "drained":
            await self._is_drained.wait()
            self.poll()

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    def _request_stop(self) -> None:
        self.poll()
        if self.is_requested and (self._polling is None or self._polling.done()):
            self._polling = asyncio.create_task(self._poll_until_unset(), name="drain")

    async def _poll_until_unset(self) -> None:
        while self.is_requested:
            self.poll()
            since = asyncio.get_running_loop().time() - self._polled_seconds
            if self.state == "draining" and (not self._num_holding() or since >= FOLLOW_SECONDS):
                await self._poll_clients()
            await asyncio.sleep(
                UNSENT_CHECK_SECONDS if self._unacked or self._num_failures else CHECK_SECONDS
            )

    async def _poll_clients(self) -> None:
        self._is_answer_void = bool(self._num_holding())
        unacked = await self._poll_clients_once()
        # else something slipped in, or the command was withdrawn: `poll` saw it
        if not self._is_answer_void and unacked is not None:
            if self._unacked is None and unacked:
                logger.info(
                    "waiting for clients to receive the end of their answers clients=%d",
                    len(unacked),
                )
            self._unacked = unacked if self._unacked is None else self._unacked & unacked
            self.poll()

    async def _poll_clients_once(self) -> frozenset[str] | None:
        """Connections whose clients have yet to take something; None = not readable now."""
        self._polled_seconds = asyncio.get_running_loop().time()
        try:
            unacked = await self._poll_unacked()
        except Exception:  # such as no thread to be had
            self._num_failures += 1
            if self._num_failures == 1:
                logger.exception(
                    "cannot read the unsent bytes of connections, retrying up to %d times",
                    MOST_FAILURES,
                )
            if self._num_failures < MOST_FAILURES:
                return None
            logger.warning(
                "cannot read the unsent bytes of connections, no longer waiting for clients"
            )
            unacked = frozenset()
        self._num_failures = 0
        return unacked
