"""Feels an engine's pulse: pings it, and acts on what `stall_watch` makes of its answers.

An engine that stalls leaves every choice at once: its requests fail, `/health`
and `/ready` say why, and peers hear of it.  One that gets on again serves as
before.  One that is lost is killed, which ends its worker: whoever supervises
the worker (the kubelet, `pdctl`) starts it anew.
"""

import asyncio
import logging
from collections.abc import Callable

from pdcluster_worker.dispatch.stall_watch import period_seconds
from pdcluster_worker.dispatch.worker import Worker

logger = logging.getLogger(__name__)


class Pulse:
    """Of one worker, from its engine being ready.

    on_change:  told whether the engine stalls, before its requests fail, and when it gets on again.
    is_leaving: whether the worker is to end, which an engine that stands still does not hold up.
    """

    def __init__(self, worker: Worker, on_change: Callable[[bool], None], is_leaving: Callable[[], bool]) -> None:
        self._worker = worker
        self._on_change = on_change
        self._is_leaving = is_leaving

    async def lost(self) -> str:
        """Watch until the engine is lost; returns why, in words."""
        while True:
            if self.look():
                return f"{self._reason()}: killed"
            await asyncio.sleep(period_seconds(self._worker.policy.stall_seconds))

    def look(self) -> bool:
        """Ask, and act on the answers so far; whether the engine is lost."""
        worker, watch = self._worker, self._worker.stall_watch
        if watch.asks():
            worker.engine.ping()
        condition = watch.look(worker.policy.stall_seconds)
        if condition == "stalled" and worker.engine.stalled is None:
            self._on_change(True)
            worker.engine.stall(f"the engine of this worker stands still: {self._reason()}")
            longest = watch.longest_step_seconds
            self._tell("engine stalled reason=%s longest_step_seconds=%.1f", self._reason(), longest)
        if condition == "well" and worker.engine.stalled is not None:
            worker.engine.recover()
            self._on_change(False)
            self._tell("engine gets on again")
        return condition == "lost" or (condition == "stalled" and self._is_leaving())

    def _tell(self, message: str, *values: object) -> None:
        logger.warning(message, *values)
        self._worker.metrics.engine_stalled.set(self._worker.engine.stalled is not None)
        self._worker.tell()

    def _reason(self) -> str:
        seconds = self._worker.stall_watch.still_seconds
        limit = f"qos.stallSeconds is {self._worker.policy.stall_seconds}, beyond its longest step"
        return f"no step and no answer for {seconds:.1f} s ({limit})"
