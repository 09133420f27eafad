"""The resync: list everything, correct the cache where a watch has missed a change, enqueue all. A
difference counts as missed only if it is still there after a grace period. Beside it the liveness
of the process, for its probe: one whose requests are refused is healthy; one whose loop, queue or
watches have stalled is not, and a restart is the cure.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pdcluster_api.apiserver.kinds import PDCLUSTER, Key
from pdcluster_operator.informer.cache import (
    Cache,
    Name,
    ObjectVersion,
    name_of,
    owner_of,
    version_of,
)
from pdcluster_operator.informer.watches import ObjectLister
from pdcluster_operator.queue.work_queue import WorkQueue

logger = logging.getLogger(__name__)
GRACE_SECONDS = 5.0

# Longest time in which no reconcile begins or ends though keys wait; the length of the queue says
# nothing, since thousands take their time
MAX_WAIT_SECONDS = 120.0

MAX_WORK_SECONDS = 300.0  # Every request has a time limit, so work on one key ends long before

# Resyncs in a row that found changes which a watch had missed, before it counts as stalled
MAX_MISSES = 2


@dataclass
class QueueHealth:
    """Facts about the resync and the watches."""

    resync_seconds: float  # the interval that was set
    resynced: float  # when the last resync ended, on the clock of `problems`
    _missed: Counter[str] = field(default_factory=Counter)

    def resync_ended(self, now: float, kinds: Iterable[str], missed: Iterable[str]) -> None:
        """kinds: those that were listed; missed: those of them whose watch had missed a change."""
        self.resynced = now
        missed = set(missed)
        for kind in kinds:
            self._missed[kind] = self._missed[kind] + 1 if kind in missed else 0

    def problems(self, queue: WorkQueue[Key], now: float) -> list[str]:
        """Parts that have stalled, as text; empty = none."""
        found = [
            f"the watch of {kind} is silent"
            for kind, count in self._missed.items()
            if count >= MAX_MISSES
        ]
        if now - self.resynced > 3 * self.resync_seconds + MAX_WORK_SECONDS:
            found.append(f"no resync ended for {now - self.resynced:.0f} s")
        if queue.stood_still(now) > MAX_WAIT_SECONDS:
            found.append(
                f"PDClusters wait and no reconcile has begun or ended for "
                f"{queue.stood_still(now):.0f} s"
            )
        found += [
            f"the work on {key} takes {seconds:.0f} s"
            for key, seconds in queue.in_work(now)
            if seconds > MAX_WORK_SECONDS
        ]
        return found


@dataclass
class Resync:
    """Runs as one task for the whole process."""

    listing: ObjectLister
    cache: Cache
    add: Callable[[Key], None]  # adds a key to the work queue
    progress: QueueHealth
    grace_seconds: float = GRACE_SECONDS
    _early: asyncio.Event = field(default_factory=asyncio.Event)

    async def fill(self) -> None:
        """List everything into the cache.  Raises errors of the listing."""
        for kind in self.listing.kinds:
            async for body in self.listing.bodies(kind):
                self.cache.put(kind, body)
        self.progress.resync_ended(time.monotonic(), (), ())

    def request(self) -> None:
        self._early.set()

    async def run(self) -> None:
        """Resync every `resync_seconds`, check PDClusters on request; failures are logged."""
        due = time.monotonic() + self.progress.resync_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await self._early.wait()
            self._early.clear()
            is_due = time.monotonic() >= due
            try:
                await (self.once() if is_due else self.check([PDCLUSTER.name]))
            except Exception:
                logger.exception("resync failed")
                await asyncio.sleep(self.grace_seconds)
            if is_due:
                due = time.monotonic() + self.progress.resync_seconds

    async def once(self) -> None:
        missed = await self.check(self.listing.kinds)
        self.progress.resync_ended(time.monotonic(), self.listing.kinds, missed)
        for key in self.cache.clusters():
            self.add(key)

    async def check(self, kinds: Iterable[str]) -> list[str]:
        """List some kinds and correct the cache; returns those whose watch had missed a change."""
        suspects = {kind: await self._differences(kind) for kind in kinds}
        await asyncio.sleep(self.grace_seconds)
        missed = [kind for kind, names in suspects.items() if await self._repair(kind, names)]
        for kind in missed:
            logger.warning("a watch missed changes kind=%s", kind)
        return missed

    async def _differences(self, kind: str) -> dict[Name, ObjectVersion | None]:
        before = self.cache.versions(kind)
        bodies = self.listing.bodies(kind)
        listed = {
            name_of(kind, body): version_of(body) async for body in bodies if owner_of(kind, body)
        }
        return {
            name: before.get(name)
            for name in sorted({*before, *listed})
            if before.get(name) != listed.get(name)
        }

    async def _repair(self, kind: str, suspects: Mapping[Name, ObjectVersion | None]) -> bool:
        """Read again what no watch has delivered since; returns whether there was anything."""
        has_missed = False
        for name, version in suspects.items():
            if self.cache.version(name) != version:
                continue
            body = await self.listing.body(name)
            if self.cache.version(name) != version:  # a watch delivered it during the read
                continue
            has_missed = True
            keys = {self.cache.forget(name), None if body is None else self.cache.put(kind, body)}
            for key in filter(None, keys):
                self.add(key)
        return has_missed
