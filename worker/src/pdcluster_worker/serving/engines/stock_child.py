"""A worker's stock engine: its process if it is ours, and a client to each of its ranks.

Its ranks live and end together, since one HTTP server stands before all of them.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import msgspec

from pdcluster_worker.backoff import run_until_first_ends
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.errors import WRONG_SETTING, WorkerError, embeds_only
from pdcluster_worker.messages.engine import Begin, Stop
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.group import Child
from pdcluster_worker.stock_engine.adapters import check_adapters
from pdcluster_worker.stock_engine.cache_events import Subscription
from pdcluster_worker.stock_engine.command import Command
from pdcluster_worker.stock_engine.engine import StockEngine
from pdcluster_worker.stock_engine.engine_api import VLLM_API, EngineApi
from pdcluster_worker.stock_engine.facts import StockFacts, read_facts
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS, to_embed
from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from pdcluster_worker.stock_engine.metrics_page import StockMetrics
from pdcluster_worker.stock_engine.reports import Reports
from pdcluster_worker.stock_engine.sglang_api import sglang_api

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two questions whether it serves yet."""


def api_of(engine: EngineConfig) -> EngineApi:
    if engine.type != "sglang":
        return VLLM_API
    return sglang_api(block_size=engine.block_size, prefix_caching=engine.prefix_caching)


class StockServer:
    """Its ranks start and end together."""

    def __init__(self, config: WorkerConfig) -> None:
        vllm, size = config.engine.vllm, config.engine.data_parallel_size
        self.ranks = [StockChild(self, config, rank) for rank in range(size)]
        self._config = config
        self._clients = [rank.http for rank in self.ranks]
        self._command = Command(vllm.command, vllm.env) if vllm.command else None
        self.api = api_of(config.engine)
        self._num_open = 0
        self._living: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start its command, if it has one, once each rank listens for its events."""
        self._num_open += 1
        if self._num_open < len(self.ranks):
            return
        try:
            await asyncio.to_thread(check_adapters, self._config)
            if self._command is not None:
                await self._command.start()
        except WorkerError as e:
            self.end(str(e), WRONG_SETTING)
            return
        self._living = asyncio.create_task(self._live(), name="stock engine")

    def kill(self, lost: "StockChild", reason: str) -> None:
        """End one that answers nothing; another's stays out until it is restarted."""
        if self._command is None:
            logger.error("the engine is lost and its container is to restart reason=%s", reason)
            lost.client.is_given_up = True
            well = [rank for rank in self.ranks if rank.client.problem is None]
            if len(well) < len(self.ranks):
                for rank in well:
                    rank.client.give_up(reason)  # the server restarts, and all its ranks
            return
        self._command.kill()
        lost.client.fail(reason)
        for rank in self.ranks:
            rank.client.give_up(reason)
            if not rank.killed.done():
                rank.killed.set_result(None)

    def leave(self, lost: "StockChild", reason: str) -> None:
        """End one that answers nothing, or where others serve let those finish their requests."""
        if any(rank.client.problem is None for rank in self.ranks if rank is not lost):
            lost.client.give_up(reason)
        else:
            self.kill(lost, reason)

    def end(self, reason: str, status: int) -> None:
        for rank in self.ranks:
            rank.client.has_ended = True
            rank.client.fail(reason)
            if not rank.exit_status.done():
                rank.exit_status.set_result(status)

    async def stop(self) -> None:
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        for rank in self.ranks:
            rank.close()
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
                self.end(str(ended.result()), 1)
        except WorkerError as e:
            self.end(str(e), WRONG_SETTING)
        except (HttpFailedError, msgspec.DecodeError) as e:
            self.end(str(e), 1)
        except Exception as e:
            # Otherwise requests would wait for an engine that nothing speaks with.
            logger.exception("the client of the stock engine failed")
            self.end(f"its client failed: {e!r}", 1)
        finally:
            for part in (serving, *ends):
                part.cancel()
            await asyncio.gather(serving, *ends, return_exceptions=True)

    async def _serve(self) -> None:
        served = await self._served()
        if served[0].embeds:
            self.api = replace(
                self.api,
                refusal=lambda _: (str(embeds_only()), "model"),
                generate_path=EMBEDDINGS,
                prompt_only=to_embed,
            )
        page = StockMetrics(
            self._clients[0],
            [facts.scrape for facts in served],
            self._on_gone,
            self.api.numbers_path,
            self.api.read_numbers,
        )
        for rank, facts in zip(self.ranks, served, strict=True):
            rank.serve(facts, page)
        await run_until_first_ends(page.run(), *(rank.take_all() for rank in self.ranks))

    async def _served(self) -> list[StockFacts]:
        seconds = self._config.engine.vllm.startup_timeout_seconds
        try:
            async with asyncio.timeout(seconds if self._command else None):
                await self._healthy()
                return await read_facts(self._clients, self._config, self.api)
        except TimeoutError as e:
            output = self._command.last_lines() if self._command else ""
            message = f"it does not serve after {seconds} s{output}"
            raise HttpFailedError(message) from e

    async def _healthy(self) -> None:
        while True:
            try:
                await self._clients[0].get("/health")
                self._wait("the engine answers /health, and warms up")
                return
            except HttpFailedError as e:
                self._wait(f"the engine does not serve yet: {e}")
            await asyncio.sleep(POLL_SECONDS)

    def _wait(self, reason: str) -> None:
        for rank in self.ranks:
            rank.client.on_wait(reason)

    def _on_gone(self, reason: str) -> None:
        if not self._gone.done():
            self._gone.set_result(reason)


class StockChild(Child):
    """One rank of a server: an engine of its worker."""

    def __init__(self, server: StockServer, config: WorkerConfig, rank: int) -> None:
        super().__init__(rank, EngineClient())
        vllm, size = config.engine.vllm, config.engine.data_parallel_size
        self.http = StockClient(vllm.port, rank if size > 1 else None)
        self._server = server
        self._config = config
        host = config.listen.host if vllm.events_from_pods else "127.0.0.1"
        self._subscription = Subscription(host, vllm.kv_events_port + rank, self._on_batch)
        self._reports: Reports | None = None
        self._engine: StockEngine | None = None

    async def start(self) -> None:
        """`client.ready()` says when it serves."""
        try:
            self._subscription.open()
        except WorkerError as e:
            self._server.end(str(e), WRONG_SETTING)
        else:
            await self._server.start()

    def kill(self, reason: str) -> None:
        self._server.kill(self, reason)

    def leave(self, reason: str) -> None:
        self._server.leave(self, reason)

    async def stop(self) -> None:
        if self.rank == 0:
            await self._server.stop()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._reports is not None:
            self._reports.close()
        self._subscription.close()

    def serve(self, facts: StockFacts, page: StockMetrics) -> None:
        client, max_sequences = self.client, self._config.engine.max_sequences
        reports = Reports(page, self.rank, client.deliver, max_sequences=max_sequences)
        model = self._config.model.name
        api = self._server.api
        engine = StockEngine(self.http, model, reports, client.deliver, trace=client.trace, api=api)
        reports.has_stalled = lambda: client.stalled is not None
        self._reports, self._engine = reports, engine
        client.count_embeddings = reports.embedding
        client.deliver([facts.ready])

    async def take_all(self) -> None:
        assert self._engine is not None, "it serves"
        while True:
            for message in await self.client.inputs():
                if not isinstance(message, Begin | Stop):
                    self._engine.take(message)

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
