"""Reads of a PDCluster's etcd, behind its reconciles or within one, each with a time limit.

An answer, or the error of a read that gave none, goes into `known_records`; when a read behind the
reconciles changes what is known, the PDCluster is enqueued.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime

from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests, EtcdTarget
from pdcluster_operator.reconcile.known_records import KnownRecords

logger = logging.getLogger(__name__)

MAX_CONCURRENT_READS = 8
"""Background reads at a time: an operator that starts has to read for all clusters."""

MAX_FIRST_READS = 2
"""Reconciles that wait for a first answer at a time: more would take all runners, and an answer
enqueues its cluster anyway.
"""

FIRST_READ_TIMEOUT_SECONDS = 4.0
"""Longest wait of a cluster's first reconcile for an answer, so that its first status need not
be corrected.
"""

READ_TIMEOUT_SECONDS = 8.0
"""Timeout of one read or write for which a reconcile waits."""

BACKGROUND_TIMEOUT_SECONDS = 60.0
"""Time limit of a read for which none waits: sixteen endpoints, 3 s each, and the Secret."""


@dataclass(frozen=True)
class ReadLimits:
    """Bounds that all PDClusters share.

    reads:   background reads; of given etcds all are read at once, so that dead ones hold up none
    waiting: reconciles that wait for a first answer
    """

    reads: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS)
    )
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FIRST_READS))


@dataclass
class EtcdReader:
    """Reads one etcd, behind the reconciles once at a time; see `etcd_view.EtcdView`."""

    requests: EtcdRequests
    enqueue: Callable[[], None]
    slots: ReadLimits
    clock: Callable[[], float]
    now: Callable[[], datetime]
    reading: asyncio.Task[None] | None = None

    async def first_read(self) -> None:
        """Wait a while for the read that is under way, unless others do."""
        if self.reading is not None and not self.slots.waiting.locked():
            async with self.slots.waiting:
                await asyncio.wait({self.reading}, timeout=FIRST_READ_TIMEOUT_SECONDS)

    def read_if_due(self, known: KnownRecords, seconds: float) -> None:
        """Start a read, unless one is under way or has ended less than so many seconds ago."""
        is_due = known.at is None or self.clock() - known.at >= seconds
        if is_due and self.reading is None:
            self.reading = asyncio.create_task(
                self._read_behind(known), name=f"records of {known.target.key}"
            )

    async def _read_behind(self, known: KnownRecords) -> None:
        before = known.seen
        try:
            async with contextlib.nullcontext() if known.target.is_external else self.slots.reads:
                await self.read(known, BACKGROUND_TIMEOUT_SECONDS)
        finally:
            if self.reading is asyncio.current_task():
                self.reading = None
        if known.seen != before:
            self.enqueue()

    async def read(self, known: KnownRecords, timeout: float | None = None) -> None:
        """Read now.  timeout: in seconds; None = that of a read for which a reconcile waits."""
        seconds = READ_TIMEOUT_SECONDS if timeout is None else timeout
        turn = known.next_turn()

        async def read_once() -> None:
            found = await self.requests.registered(known.target)
            known.reads += 1
            if turn > known.known_turn:
                known.last, known.known_turn = found, turn

        error = await error_of(known.target, read_once(), seconds)
        if error is not None:
            if turn > known.known_turn:  # else a later read has answered
                is_cut = isinstance(error, TimeoutMessage) and seconds < BACKGROUND_TIMEOUT_SECONDS
                self.fail(known, error, is_down=known.is_down if is_cut else True)
            return
        if known.error is not None:
            logger.info("etcd answers again key=%s", known.target.key)
        known.answered(self.clock(), self.now())

    def fail(self, known: KnownRecords, error: str, *, is_down: bool) -> None:
        """Note a read or a command that failed; see `KnownRecords.failed`."""
        if known.error != error:
            logger.info("etcd does not answer key=%s error=%s", known.target.key, error)
        known.failed(error, self.clock(), is_down=is_down)

    def stop(self) -> asyncio.Task[None] | None:
        """Cancel the read that is under way; returns it."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
        return reading


class TimeoutMessage(str):
    """The error of a request that took too long; it reads as that of any other."""


async def error_of(
    target: EtcdTarget, request: Awaitable[object], timeout: float | None = None
) -> str | None:
    """Return the error of a request as a sentence; None = there was none.

    timeout: in seconds; None = that of a request for which a reconcile waits.
    """
    seconds = READ_TIMEOUT_SECONDS if timeout is None else timeout
    try:
        async with asyncio.timeout(seconds):
            await request
    except TimeoutError:
        return TimeoutMessage(target.silence)
    except EtcdUnreachableError as e:
        logger.debug("etcd not read key=%s reason=%r", target.key, e.reason)
        return str(e)
    except ClusterError as e:
        return str(e)
    except Exception as e:
        logger.exception("etcd not asked key=%s", target.key)
        return f"{target} cannot be asked ({type(e).__name__}); the operator's log says more"
    return None
