"""A vLLM engine of this worker: its process if it is ours, and the client to it."""

import asyncio
import logging
from typing import Any

import msgspec

from pdcluster_worker.backoff import run_until_first_ends
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import WRONG_SETTING, WorkerError
from pdcluster_worker.messages.engine import Begin, Stop
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.group import Child
from pdcluster_worker.vllm_engine.cache_events import Subscription
from pdcluster_worker.vllm_engine.command import Command
from pdcluster_worker.vllm_engine.engine import VllmEngine
from pdcluster_worker.vllm_engine.facts import VllmFacts, read_facts
from pdcluster_worker.vllm_engine.http import HttpFailedError, VllmClient
from pdcluster_worker.vllm_engine.reports import Reports

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two questions whether it serves yet."""

NEVER_READY_SECONDS = 3600.0
"""Time for it to become ready, its warm-up included; the largest models load from a slow disk in
less.
"""


class VllmChild(Child):
    """The only engine of its worker."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(0, EngineClient())
        vllm = config.engine.vllm
        self._config = config
        self._http = VllmClient(vllm.port)
        self._command = Command(vllm.command, vllm.env) if vllm.command else None
        self._subscription = Subscription(vllm.kv_events_port, self._on_batch)
        self._reports: Reports | None = None
        self._engine: VllmEngine | None = None
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start its command, if it has one; `client.ready()` says when it serves."""
        try:
            self._subscription.open()
            if self._command is not None:
                await self._command.start()
        except WorkerError as e:
            self._end(str(e), WRONG_SETTING)
            return
        self._tasks = [asyncio.create_task(self._live(), name="stock engine")]

    def kill(self, reason: str) -> None:
        """End one that answers nothing; another's stays out until it is restarted."""
        if self._command is None:
            logger.error("the engine is lost and its container is to restart reason=%s", reason)
        else:
            super().kill(reason)

    def _kill(self) -> None:
        if self._command is not None:
            self._command.kill()

    async def stop(self) -> None:
        await super().stop()
        if self._engine is not None:
            self._engine.close()
        if self._reports is not None:
            self._reports.close()
        self._subscription.close()
        if self._command is not None:
            await self._command.stop()

    async def _live(self) -> None:
        ends: set[asyncio.Future[Any]] = {self._gone}
        if self._command is not None:
            ends.add(asyncio.create_task(self._command.ended()))
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait({*ends, serving}, return_when=asyncio.FIRST_COMPLETED)
            ended = next((end for end in ends if end.done()), None)
            if ended is None:
                serving.result()
            else:
                self._end(str(ended.result()), 1)
        except WorkerError as e:
            self._end(str(e), WRONG_SETTING)
        except (HttpFailedError, msgspec.DecodeError) as e:
            self._end(str(e), 1)
        except Exception as e:
            # Otherwise requests would wait for an engine that nothing speaks with.
            logger.exception("the client of the stock engine failed")
            self._end(f"its client failed: {e!r}", 1)
        finally:
            for part in (serving, *ends):
                part.cancel()
            await asyncio.gather(serving, *ends, return_exceptions=True)

    def _end(self, reason: str, status: int) -> None:
        self.client.has_ended = True
        self.client.fail(reason)
        if not self.exit_status.done():
            self.exit_status.set_result(status)

    async def _serve(self) -> None:
        served = await self._served()
        client = self.client
        model, max_sequences = self._config.model.name, self._config.engine.max_sequences
        reports = Reports(
            *(self._http, served.scrape, client.deliver, self._on_gone),
            max_sequences=max_sequences,
        )
        engine = VllmEngine(self._http, model, reports, client.deliver, client.trace)
        self._reports, self._engine = reports, engine
        client.deliver([served.ready])
        await run_until_first_ends(reports.run(), self._take_all(engine))

    async def _take_all(self, engine: VllmEngine) -> None:
        while True:
            for message in await self.client.inputs():
                if not isinstance(message, Begin | Stop):
                    engine.take(message)

    async def _served(self) -> VllmFacts:
        try:
            async with asyncio.timeout(NEVER_READY_SECONDS if self._command else None):
                await self._healthy()
                return await read_facts(self._http, self._config)
        except TimeoutError as e:
            output = self._command.last_lines() if self._command else ""
            message = f"it does not serve after {NEVER_READY_SECONDS:.0f} s{output}"
            raise HttpFailedError(message) from e

    async def _healthy(self) -> None:
        while True:
            try:
                await self._http.get("/health")
                self.client.on_wait("the engine answers /health, and warms up")
                return
            except HttpFailedError as e:
                self.client.on_wait(f"the engine does not serve yet: {e}")
            await asyncio.sleep(POLL_SECONDS)

    def _on_gone(self, reason: str) -> None:
        if not self._gone.done():
            self._gone.set_result(reason)

    def _on_batch(self, sequence: int, payload: bytes) -> None:
        """Follow its prefix cache; what came before it served is of no request of ours."""
        if self._reports is None:
            return
        try:
            events = self._reports.cache.take(sequence, payload)
        except msgspec.DecodeError as e:
            logger.warning("ignored KV events that cannot be read reason=%s", e)
            return
        if events is not None:
            self.client.deliver([events])
