"""The engine processes of one worker: starts all, restarts one that died."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from pdcluster_schema.backoff import Backoff
from pdcluster_schema.ports import MAX_ENGINES, join_address
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine import EngineReady
from pdcluster_worker.serving.engines.client import EngineClient, EngineDiedError
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.system.native_dtype import DType

logger = logging.getLogger(__name__)

PAUSE = Backoff(first=1.0, most=60.0)
"""Longest pause before an engine that died is started again; doubled each time that it lived
shorter than the last pause.
"""

FORGET_SECONDS = 300.0
"""Time for which a lost engine on another host is remembered: its supervisor may bring it back
meanwhile.
"""


class Child:
    """One engine process, which is started once.

    exit_status: of the process, when it has ended; killed: done when `kill` was called.
    """

    def __init__(self, rank: int, client: EngineClient) -> None:
        loop = asyncio.get_running_loop()
        self.rank = rank
        self.client = client  # `died` is set when the process ends
        self.exit_status: asyncio.Future[int] = loop.create_future()
        self.killed: asyncio.Future[None] = loop.create_future()
        self._tasks: list[asyncio.Task[object]] = []

    async def start(self) -> None:
        """Start the process, which loads after a message to begin."""
        raise NotImplementedError

    async def gone(self) -> None:
        """Wait until the process has ended or was killed."""
        ends: set[asyncio.Future[Any]] = {self.exit_status, self.killed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    def kill(self, reason: str) -> None:
        self.client.fail(reason)
        self._kill()
        if not self.killed.done():
            self.killed.set_result(None)

    def leave(self, reason: str) -> None:
        """Kill it while its worker drains."""
        self.kill(reason)

    def _kill(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EngineGroup:
    """All engine processes of a worker.

    new_child: makes the process of a rank, which is not started yet.
    address:   host and port of its KV, as peers reach it.
    invariant: requests give the same bits on each (`engine.batchInvariant`).
    """

    def __init__(
        self,
        size: int,
        new_child: Callable[[int], Child],
        address: Callable[[int], str],
        *,
        invariant: bool = False,
    ) -> None:
        self._invariant = invariant
        self.engines = Engines()
        # The child that took the worker with it: any while they load, later the last.
        self.ended: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        # Called with an engine that begins to serve, and whether it was restarted here; must not
        # block.
        self.on_start: Callable[[Engine, bool], None] = lambda _, __: None
        # Called with an engine that has died while others serve.
        self.on_end: Callable[[Engine], None] = lambda _: None
        # Called with an engine on another host that has not come back.
        self.on_forget: Callable[[Engine], None] = lambda _: None
        self._new_child = new_child
        self._address = address
        self._children = [new_child(rank) for rank in range(size)]
        self._dtype: DType = "float32"
        self._on_child: Callable[[Child], None] = lambda _: None
        self._adopted: dict[int, Child] = {}  # on other hosts, by rank
        self._forgetting: set[asyncio.TimerHandle] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False

    async def start(self) -> None:
        """Start all processes, which wait for `begin` before they load."""
        for child in self._children:
            await child.start()
        self._tasks = [
            asyncio.create_task(self._keep(child), name=f"engine {child.rank}")
            for child in self._children
        ]

    def report_children(self, on_child: Callable[[Child], None]) -> None:
        self._on_child = on_child
        for child in self._children:
            on_child(child)

    def begin(self, dtype: DType) -> None:
        self._dtype = dtype
        for child in self._children:
            child.client.begin(dtype)

    async def ready(self) -> Engines:
        """Wait until all serve.  Raises EngineDiedError, ModelError."""
        facts = [await child.client.ready() for child in self._children]
        for child, its_facts in zip(self._children, facts, strict=True):
            _check_same(facts[0], its_facts, invariant=self._invariant)
            self.engines.add(self._engine(child, its_facts))
        return self.engines

    @property
    def failed(self) -> Child | None:
        """The child whose end is that of the worker; None while there is none."""
        if self.ended.done():
            return self.ended.result()
        died = [child for child in self._children if child.client.died is not None]
        is_left = any(engine.client.died is None for engine in self.engines)
        return died[0] if died and not is_left else None

    def kill(self, engine: Engine, reason: str) -> None:
        child = self._adopted.get(engine.rank) or self._children[engine.rank]
        if child.client is not engine.client:
            return
        if self._is_ending:
            child.leave(reason)
        else:
            child.kill(reason)

    def free_rank(self) -> int | None:
        """For an engine on another host; None when there are as many as there may be."""
        ranks = range(len(self._children), MAX_ENGINES)
        return next((rank for rank in ranks if rank not in self._adopted), None)

    async def adopt(self, child: Child, host: str) -> None:
        """Let an engine on another host serve until it is gone."""
        self._adopted[child.rank] = child
        try:
            await child.start()
            facts = await child.client.ready()
            _check_same(self.engines.first.facts, facts, invariant=self._invariant)
            engine = Engine(child.client, facts, join_address(host, facts.kv_ports[0]), child.rank)
            self.engines.add(engine)
            self.on_start(engine, False)
            await child.gone()
            if self._lives_without(child):
                self._forget_later(engine)
            elif not self.ended.done():
                self.ended.set_result(child)
        except EngineDiedError:
            return
        except ModelError as e:
            child.kill(str(e))
        finally:
            del self._adopted[child.rank]

    async def stop(self) -> None:
        self._is_ending = True
        for handle in self._forgetting:
            handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))

    def leave(self) -> None:
        """Start no engine again: the worker is to end."""
        self._is_ending = True

    async def _keep(self, child: Child) -> None:
        clock = asyncio.get_running_loop().time
        num_ends, pause = 1, PAUSE.first
        while True:
            since = clock()
            await child.gone()
            if not self._lives_without(child):
                if not self.ended.done():
                    self.ended.set_result(child)
                return
            num_ends = 1 if clock() - since > pause else num_ends + 1
            pause = PAUSE.after(num_ends)
            await child.stop()
            await asyncio.sleep(pause)
            if self._is_ending:
                return
            while (again := await self._try_again(child.rank)) is None:
                num_ends += 1
                pause = PAUSE.after(num_ends)
                await asyncio.sleep(pause)
                if self._is_ending:
                    return
            child = again

    async def _try_again(self, rank: int) -> Child | None:
        """Return the new process, None where the machine gives none now."""
        try:
            return await self._start_again(rank)
        except OSError as e:
            logger.warning("an engine cannot be started rank=%d reason=%s", rank, e)
            return None

    def _lives_without(self, child: Child) -> bool:
        """Take a dead engine out; False when no other one is left."""
        others = [
            engine
            for engine in self.engines
            if engine.client is not child.client and engine.client.died is None
        ]
        if not others:
            return False
        reason = child.client.died or "it ended"
        logger.error("engine died rank=%d reason=%s: the others go on serving", child.rank, reason)
        mine = next((engine for engine in self.engines if engine.client is child.client), None)
        if mine is None:
            engine, _ = self.engines.lost[child.rank]
            self.engines.lost[child.rank] = engine, reason
        else:
            self.engines.remove(mine, reason)
            self.on_end(mine)
        return True

    def _forget_later(self, engine: Engine) -> None:
        def forget() -> None:
            self._forgetting.discard(handle)
            if self.engines.forget(engine):
                logger.info("a headless engine has not come back rank=%d", engine.rank)
                self.on_forget(engine)

        handle = asyncio.get_running_loop().call_later(FORGET_SECONDS, forget)
        self._forgetting.add(handle)

    async def _start_again(self, rank: int) -> Child:
        child = self._children[rank] = self._new_child(rank)
        self._on_child(child)
        logger.info("starting an engine again rank=%d", rank)
        await child.start()
        child.client.begin(self._dtype)
        try:
            facts = await child.client.ready()
            _check_same(self.engines.first.facts, facts, invariant=self._invariant)
        except EngineDiedError:
            return child
        except ModelError as e:
            child.kill(str(e))
            return child
        engine = self._engine(child, facts)
        self.engines.add(engine)
        self.on_start(engine, True)
        logger.info("engine serves again rank=%d engine=%s", rank, facts.engine_id)
        return child

    def _engine(self, child: Child, facts: EngineReady) -> Engine:
        return Engine(child.client, facts, self._address(facts.kv_ports[0]), child.rank)


def _check_same(first: EngineReady, other: EngineReady, *, invariant: bool) -> None:
    """Raise ModelError unless requests may run on either with the same tokens."""

    def compared(facts: EngineReady) -> tuple[object, ...]:
        return facts.geometry, facts.weights, facts.dtype, facts.vocab_size

    if compared(first) != compared(other):
        raise ModelError(
            "the engines of this worker have loaded different models: was the model's folder "
            "changed between two starts?"
        )
    if invariant and first.device.operations != other.device.operations:
        raise ModelError(
            f"operations are {first.device.operations} and {other.device.operations}, which give "
            "other bits: under engine.batchInvariant "
            "set PDCLUSTER_KERNELS to a level that all hosts have, or leave engine.batchInvariant "
            "out"
        )
