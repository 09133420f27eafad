"""Watch one engine for stalls: send pings, and act on the verdicts of `stall_watch`."""

import asyncio
import logging
from collections.abc import Callable

from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.engines.stall_watch import period_seconds
from pdcluster_worker.serving.worker_context import WorkerContext

logger = logging.getLogger(__name__)


class EngineMonitor:
    """Watch over one engine of a worker, from the moment it is ready.

    on_change:  called with the engine and True before the requests of a stall fail, and False when
                it recovers.
    is_leaving: True if the worker is to end; a stalled engine does not delay that.
    """

    def __init__(
        self,
        worker: WorkerContext,
        engine: Engine,
        on_change: Callable[[Engine, bool], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._on_change = on_change
        self._is_leaving = is_leaving

    async def lost(self) -> str:
        """Watch until the engine is lost; returns why, in words."""
        while True:
            if self.poll():
                return f"{self._reason()}: killed"
            await asyncio.sleep(period_seconds(self._worker.policy.stall_seconds))

    def poll(self) -> bool:
        """Ask, and act on the answers so far; whether the engine is lost."""
        worker, client, watch = self._worker, self._engine.client, self._engine.stall_watch
        if watch.needs_ping():
            client.ping()
        condition = watch.poll(worker.policy.stall_seconds)
        if condition == "stalled" and client.stalled is None:
            self._on_change(self._engine, True)
            client.stall(f"the engine of this worker has stalled: {self._reason()}")
            longest = watch.longest_step_seconds
            self._send(
                "engine stalled reason=%s longest_step_seconds=%.1f", self._reason(), longest
            )
        if condition == "well" and client.stalled is not None:
            client.recover()
            self._on_change(self._engine, False)
            self._send("engine makes progress again")
        return condition == "lost" or (condition == "stalled" and self._is_leaving())

    def _send(self, message: str, *values: object) -> None:
        logger.warning(message, *values)
        self._worker.engines_changed()

    def _reason(self) -> str:
        seconds = self._engine.stall_watch.still_seconds
        limit = f"qos.stallSeconds is {self._worker.policy.stall_seconds}, beyond its longest step"
        return f"no step and no answer for {seconds:.1f} s ({limit})"


class EngineMonitors:
    """Runs one monitor task per engine.  kill: ends a lost engine."""

    def __init__(
        self, new_monitor: Callable[[Engine], EngineMonitor], kill: Callable[[Engine, str], None]
    ) -> None:
        self._new_monitor = new_monitor
        self._kill = kill
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def start(self, engine: Engine) -> None:
        self._tasks[engine] = asyncio.create_task(self._watch(engine), name=f"pulse {engine.rank}")

    def end(self, engine: Engine) -> None:
        if (task := self._tasks.pop(engine, None)) is not None:
            task.cancel()

    def close(self) -> None:
        for engine in list(self._tasks):
            self.end(engine)

    async def _watch(self, engine: Engine) -> None:
        self._kill(engine, await self._new_monitor(engine).lost())
