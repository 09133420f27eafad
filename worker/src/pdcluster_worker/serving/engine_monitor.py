"""Watch engines for stalls: send pings, and act on the verdicts of `stall_watch`."""

import asyncio
import logging
from collections.abc import Callable

from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.engines.stall_watch import period_seconds
from pdcluster_worker.serving.worker_context import WorkerContext

logger = logging.getLogger(__name__)


class EngineMonitor:
    """One per worker; it watches each engine in a task, from the moment that it is ready.

    on_change:  called with the engine and True before the requests of a stall fail, and False when
                it recovers.
    is_leaving: True if the worker is to end; a stalled engine does not delay that.
    kill:       ends a lost engine, with a reason in words.
    """

    def __init__(
        self,
        worker: WorkerContext,
        on_change: Callable[[Engine, bool], None],
        is_leaving: Callable[[], bool],
        kill: Callable[[Engine, str], None],
    ) -> None:
        self._worker = worker
        self._on_change = on_change
        self._is_leaving = is_leaving
        self._kill = kill
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def start(self, engine: Engine) -> None:
        name = f"monitor of engine {engine.rank}"
        self._tasks[engine] = asyncio.create_task(self._watch(engine), name=name)

    def end(self, engine: Engine) -> None:
        if (task := self._tasks.pop(engine, None)) is not None:
            task.cancel()

    def close(self) -> None:
        for engine in list(self._tasks):
            self.end(engine)

    async def _watch(self, engine: Engine) -> None:
        while True:
            if self.poll(engine):
                self._kill(engine, f"{self._reason(engine)}: killed")
                return
            await asyncio.sleep(period_seconds(self._worker.policy.stall_seconds))

    def poll(self, engine: Engine) -> bool:
        """Ask, and act on the answers so far; whether the engine is lost."""
        client, watch = engine.client, engine.stall_watch
        if watch.needs_ping():
            client.ping()
        condition = watch.poll(self._worker.policy.stall_seconds)
        if condition == "stalled" and client.stalled is None:
            self._on_change(engine, True)
            reason = self._reason(engine)
            client.stall(f"the engine of this worker has stalled: {reason}")
            longest = watch.longest_step_seconds
            logger.warning("engine stalled reason=%s longest_step_seconds=%.1f", reason, longest)
            self._worker.engines_changed()
        if condition == "well" and client.stalled is not None and client.died is None:
            client.recover()
            self._on_change(engine, False)
            logger.warning("engine makes progress again")
            self._worker.engines_changed()
        return condition == "lost" or (condition == "stalled" and self._is_leaving())

    def _reason(self, engine: Engine) -> str:
        seconds = engine.stall_watch.still_seconds
        limit = f"qos.stallSeconds is {self._worker.policy.stall_seconds}, beyond its longest step"
        return f"no step and no answer for {seconds:.1f} s ({limit})"
