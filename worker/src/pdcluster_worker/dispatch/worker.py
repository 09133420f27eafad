"""What dispatch knows of this worker, and what every request on it needs: engine, peers, policy, metrics.

Kept up to date by `server_process`; read by `decoding` and `prefilling`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdcluster_worker.config import PolicyConfig, Role
from pdcluster_worker.dispatch.engine_client import EngineClient
from pdcluster_worker.engine.messages import BlockEvents, EngineReady, EngineStats
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.records import WorkerState
from pdcluster_worker.peers.types import Load, Report
from pdcluster_worker.routing.prefix_index import PrefixIndex
from pdcluster_worker.routing.waiting import CreditQueue

REPORT_SECONDS = 1.0
"""How often peers hear of our load (docs/architecture.md, 'Discovery')."""

_SELF = ""
"""Our key in the prefix index; a pod's name is never empty."""


@dataclass(slots=True)
class Worker:
    """One worker's state as its server process sees it.

    engine_ready:  the engine's facts.
    kv_address:    host:port where peers write KV.
    policy:        the one in force now.
    blocks:        prefix caches: our own, and those of the peers that we watch.
    credit_queue:  requests that wait for a prefill worker; stays empty on a prefill worker.
    """

    role: Role
    engine: EngineClient
    engine_ready: EngineReady
    kv_address: str
    metrics: Metrics
    policy: PolicyConfig
    credit_queue: CreditQueue = field(default_factory=CreditQueue)
    state: WorkerState = "starting"
    blocks: PrefixIndex = field(default_factory=PrefixIndex)
    active: int = 0
    _changes: "set[asyncio.Queue[BlockEvents]]" = field(default_factory=set)
    _room: "list[tuple[int, asyncio.Future[None]]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine.on_blocks.append(self._on_blocks)
        self.engine.on_stats.append(self._on_stats)
        self._export_queues()

    @property
    def engine_id(self) -> str:
        """Identity of this start of the engine."""
        return self.engine_ready.engine_id

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.engine_ready.geometry.block_size

    def cached_tokens(self, hashes: list[bytes], num_tokens: int) -> int:
        """Prefix hit here: whole blocks, and at least one token is always left to compute [V15]."""
        return min(self.blocks.match(_SELF, hashes), (num_tokens - 1) // self.block_size) * self.block_size

    @contextmanager
    def request(self, *, promised: bool = False) -> Iterator[None]:
        """Count a request in, and out at the end.

        Raises RequestError 503 when this worker takes no new ones, unless it was promised (a credit) before that.
        """
        if self.state != "ready" and not promised:
            message = f"this worker is {self.state}: send the request to another one"
            raise RequestError(message, status=503, code="draining", retry_after_seconds=1)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def room(self, needed_blocks: int) -> None:
        """Wait until the engine reports that many free blocks.

        Its last report counts too: an engine that frees them and goes idle does not say so twice.
        """
        if self.engine.stats is not None and self.engine.stats.free_blocks >= needed_blocks:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (needed_blocks, future)
        self._room.append(entry)
        try:
            await future
        finally:
            self._room.remove(entry)

    def load(self) -> Load:
        """This worker's load now."""
        stats = self.engine.stats
        queue = self.credit_queue
        if stats is None:
            return Load(state=self.state, total_blocks=self.engine_ready.num_blocks)
        return Load(
            num_running=stats.num_running + stats.num_receiving,  # whatever holds blocks here
            num_waiting=stats.num_waiting,
            waiting_tokens=stats.waiting_tokens,
            credit_queue_requests=queue.num_requests,
            credit_queue_tokens=queue.num_tokens,
            free_blocks=stats.free_blocks,
            total_blocks=self.engine_ready.num_blocks,
            state=self.state,
        )

    async def reports(self) -> AsyncGenerator[Report, None]:
        """A snapshot, then load and the changes of the prefix cache about once a second, until closed."""
        changes: asyncio.Queue[BlockEvents] = asyncio.Queue()
        self._changes.add(changes)
        try:
            yield Report(load=self.load(), stored=tuple(self.blocks.hashes(_SELF)), snapshot=True)
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                stored, removed = merge([changes.get_nowait() for _ in range(changes.qsize())])
                yield Report(load=self.load(), stored=tuple(stored), removed=tuple(removed))
        finally:
            self._changes.discard(changes)

    def _export_queues(self) -> None:
        metrics = self.metrics
        metrics.num_requests_waiting.set_function(lambda: self.load().num_waiting + self.credit_queue.num_requests)
        metrics.prefill_queue_requests.set_function(lambda: self._prefill_queue()[0])
        metrics.prefill_queue_tokens.set_function(lambda: self._prefill_queue()[1])

    def _prefill_queue(self) -> tuple[int, int]:
        """Our part of the prefill queue (docs/architecture.md), in requests and tokens."""
        if self.role == "prefill":
            load = self.load()
            return load.num_waiting, load.waiting_tokens
        return self.credit_queue.num_requests, self.credit_queue.num_tokens

    def _on_blocks(self, events: BlockEvents) -> None:
        self.blocks.apply(_SELF, events.stored, events.removed)
        for changes in self._changes:
            changes.put_nowait(events)

    def _on_stats(self, stats: EngineStats) -> None:
        for needed, future in self._room:
            if stats.free_blocks >= needed and not future.done():
                future.set_result(None)


def merge(events: list[BlockEvents]) -> tuple[list[bytes], list[bytes]]:
    """The net effect of several events: hashes stored and hashes removed, disjoint.  In both lists of one event, removed wins."""
    final: dict[bytes, bool] = {}
    for event in events:
        final.update(dict.fromkeys(event.stored, True))
        final.update(dict.fromkeys(event.removed, False))
    return [h for h, stored in final.items() if stored], [h for h, stored in final.items() if not stored]
