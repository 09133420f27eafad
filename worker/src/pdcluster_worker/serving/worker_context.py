"""State of this worker that every request on it needs: engine, peers, policy, metrics."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.config.worker import NO_ACCELERATOR, Role
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.block_hash import request_hashes
from pdcluster_worker.messages.engine import BlockEvents, EngineReady, EngineStats, PrefillDone
from pdcluster_worker.messages.peers import PrefillPlace, Report, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.records import StoppedTier, WorkerState
from pdcluster_worker.routing.prefill_choice import (
    REQUESTING_HEADS,
    CreditQueue,
    LinkRates,
    RemoteRatio,
)
from pdcluster_worker.routing.prefix_index import PrefixIndex, credited
from pdcluster_worker.serving.engines.client import EngineStalledError
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.estimation import Estimation
from pdcluster_worker.serving.group_order import GroupOrder
from pdcluster_worker.serving.tier_reports import stopped_tiers, tier_loads
from pdcluster_worker.stock_engine.front_end import StockFrontEnd
from pdcluster_worker.tracing.request_trace import RecentTraces

REPORT_SECONDS = 1.0
"""Seconds between two reports of our load to peers (docs/architecture.md, 'Discovery')."""


NO_DECODE_WORKER_SECONDS = 2
"""Delay before a client of a router may try again: about as long as discovery and handshake of a
returning worker take.
"""


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """Facts of a router, in place of an engine's."""

    worker_id: str  # its name for peers
    block_size: int  # of its revision's KV blocks, until `WorkerContext.peer_block_size` says it


@dataclass(slots=True)
class WorkerContext:
    """One worker's state as its server process sees it."""

    role: Role
    engines: Engines  # those that have loaded; a router has none
    metrics: Metrics
    policy: PolicyConfig
    # Requests that wait for a prefill worker; stays empty on a prefill worker.
    credit_queue: CreditQueue = field(default_factory=CreditQueue)
    state: WorkerState = "starting"
    # Prefix caches of the peers that we watch.
    blocks: PrefixIndex = field(default_factory=PrefixIndex)
    active: int = 0  # requests that run here, are relayed, or are prefilled for a peer
    num_relayed: Callable[[], int] = lambda: 0  # requests whose bytes a router relays
    num_waiting_for_prefix: int = 0  # that wait for KV of another one: no reason for more workers
    # False while clients may still be led to this worker, which drains by a command
    is_drain_noticed: Callable[[], bool] = lambda: True
    has_ended: bool = False  # nothing is taken any more, because the process is about to end
    on_request: Callable[[], None] = lambda: None
    on_engines: Callable[[], None] = lambda: None  # called when an engine begins to serve or stops
    # Where long prompts of this decode worker were prefilled.
    share: RemoteRatio = field(default_factory=RemoteRatio)
    # Of this decode worker's prompts, by place.
    num_prefills: "Counter[PrefillPlace]" = field(default_factory=Counter)
    # Shares of time, 0 to 1, that compute and GPU memory are busy; 0 = unknown.
    occupancy: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    # How fast KV moves to this decode worker, in tokens: what a token is differs by layer.
    pair_rates: LinkRates = field(default_factory=LinkRates)
    # How fast each prefill worker computes, in tokens.
    prefill_rates: LinkRates = field(default_factory=LinkRates)
    gpu: str = NO_ACCELERATOR
    promised_tokens: Callable[[], int] = lambda: 0  # of a prefill worker: granted, or in hand
    sent_bytes_per_second: float = 0.0  # of the last KV transfer from here; 0 = there was none
    # That moved the last KV to or from here; transport_note: why not the one that engine.transport
    # asks for, empty = it did.  Before any, the one that it has.
    transport: str = ""
    transport_note: str = ""
    engineless: RouterInfo | None = None  # of a router
    peer_block_size: Callable[[], int] = lambda: 0  # of most decode workers; 0 = unknown
    front_end: StockFrontEnd | None = None  # of its engine, where that renders prompts
    absence: Callable[[], str] = lambda: "none is registered"  # why no decode worker takes new work
    # Of the last requests, at its HTTP side too.
    traces: RecentTraces = field(default_factory=RecentTraces)
    # Of this worker for its peers: that of its first engine at its start.
    engine_id: str = field(init=False)
    estimation: Estimation = field(init=False)  # of waiting times, see `serving.estimation`
    _facts: EngineReady | None = field(init=False)
    # Of each peer that listens: set at a change of state, and cache changes since its last report.
    _listeners: dict[asyncio.Event, list[BlockEvents]] = field(default_factory=dict)
    _block_waiters: "dict[str, tuple[Engine, int, asyncio.Future[None]]]" = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._facts = self.engines.first.facts if self.engineless is None else None
        self.engine_id = (
            self.engine_ready.engine_id if self.engineless is None else self.engineless.worker_id
        )
        self.engines.on_blocks.append(self._on_blocks)
        self.engines.on_stats.append(self._on_stats)
        self.engines.on_open = lambda engine: self.metrics.engine_requests.labels(
            str(engine.rank)
        ).inc()
        self.estimation = Estimation(self.metrics, lambda: self.policy.estimation)
        order = GroupOrder(
            self.estimation,
            self.metrics,
            lambda: self.policy.estimation,
            lambda: [engine.client for engine in self.engines],
        )
        self.estimation.on_change = order.update
        self._export_queues()
        self._export_engines()
        for engine in self.engines:
            engine.client.adapters.on_change = self.notify_peers
        if self._facts is not None:
            self.note_transport(self._facts.transport)

    @property
    def engine_ready(self) -> EngineReady:
        assert self._facts is not None, "a router has no engine"
        return self._facts

    @property
    def block_size(self) -> int:
        """A router takes that of its decode workers, whose engines may choose it themselves."""
        if self.engineless is None:
            return self.engine_ready.geometry.block_size
        return self.peer_block_size() or self.engineless.block_size

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hashes(self, spec: RequestSpec) -> list[bytes]:
        """Block hashes of all known tokens; none if prompt log probabilities are requested."""
        if spec.sampling.prompt_logprobs is not None and not spec.output:
            return []
        return request_hashes(spec, self.block_size)

    def count_long_prompt(self, *, is_remote: bool) -> None:
        """A prompt that was worth a remote prefill has been prefilled: there, or here after all."""
        self.share.add(asyncio.get_running_loop().time(), is_remote=is_remote)
        self.metrics.long_prompts.labels("remote" if is_remote else "local").inc()

    def note_transfer(self, done: PrefillDone) -> None:
        self.note_transport(done.transport, done.transport_note)
        if done.transport_note:
            self.metrics.kv_transport_fallbacks.inc()
        if done.busy_seconds > 0:
            self.sent_bytes_per_second = done.num_bytes / done.busy_seconds
            gauge = self.metrics.kv_transfer_bytes_per_second
            gauge.labels(self.transport).set(self.sent_bytes_per_second)

    def note_transport(self, transport: str, note: str = "") -> None:
        """KV has gone to or from here by this transport.  note: see `PrefillDone`."""
        self.transport_note = note
        if transport and transport != self.transport:
            self.transport = transport
            self.metrics.kv_transport_info.clear()
            self.metrics.kv_transport_info.labels(transport).set(1)

    def transfer_seconds(self, key: str, num_tokens: int) -> float:
        """Expected seconds of moving KV from that worker to here; 0 = unknown."""
        return self.pair_rates.seconds(key, num_tokens)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request in and out.  Raises RequestError 503 from a worker that has ended."""
        if self.has_ended:
            raise self.refusal()
        self.active += 1
        self.on_request()
        try:
            yield
        finally:
            self.active -= 1

    def refusal(self) -> RequestError:
        if self.state == "ready" and (self.engineless is not None or self.role == "prefill"):
            reason = f"no decode worker takes requests now ({self.absence()}): retry later"
            return RequestError(
                reason,
                status=503,
                code="no_decode_worker",
                retry_after_seconds=NO_DECODE_WORKER_SECONDS,
            )
        if self.state == "ready" and (problem := self.engines.problem) is not None:
            return EngineStalledError(problem)
        message = f"this worker is {self.state}: send the request to another one"
        return RequestError(message, status=503, code="draining", retry_after_seconds=1)

    @property
    def serves(self) -> bool:
        """True if the worker does not drain, and an engine of it serves."""
        return self.state == "ready" and self.engines.problem is None

    @property
    def takes_new(self) -> bool:
        """True if new requests of clients run here."""
        return self.serves and self.role != "prefill"

    def close(self) -> None:
        """Follow the engines no more: another context does."""
        self.engines.on_blocks.remove(self._on_blocks)
        self.engines.on_stats.remove(self._on_stats)

    def engines_changed(self) -> None:
        """Say which engines serve now: to peers, in the metrics and in our record."""
        self._export_engines()
        self.notify_peers()
        self.on_engines()

    def notify_peers(self) -> None:
        for listener in self._listeners:
            listener.set()

    def announce(self, state: WorkerState) -> None:
        """Take another state; peers that listen get a report at once."""
        self.state = state
        self.notify_peers()

    @property
    def num_holding(self) -> int:
        """Requests and transfers that must end before this worker may go."""
        clients = [engine.client for engine in self.engines if engine.client.died is None]
        transfers = sum(
            client.stats.num_transfers for client in clients if client.stats is not None
        )
        running = self.active + self.num_relayed() + transfers
        return running + sum(not client.is_reported for client in clients)

    async def wait_for_blocks(self, engine: Engine, request_id: str, needed_blocks: int) -> None:
        """Wait until its engine reports that many free blocks; its last report counts."""
        stats = engine.client.stats
        if stats is not None and stats.free_blocks >= needed_blocks:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._block_waiters[request_id] = (engine, needed_blocks, future)
        try:
            await future
        finally:
            del self._block_waiters[request_id]

    def load(self) -> WorkerLoad:
        state = self.state if self.engines.problem is None else "stalled"
        total_blocks = sum(engine.facts.num_blocks for engine in self.engines)
        busy_ratio, memory_ratio = self.occupancy()
        reported = [
            engine.client.stats for engine in self.engines if engine.client.stats is not None
        ]
        if not reported:
            return WorkerLoad(state=state, total_blocks=total_blocks, adapters=self.adapters)
        local_requests, local_tokens = self._waiting_for_blocks()
        return WorkerLoad(
            # whatever holds blocks here
            num_running=sum(stats.num_running + stats.num_receiving for stats in reported),
            num_waiting=sum(stats.num_waiting for stats in reported)
            + local_requests
            + self.num_waiting_for_prefix,
            waiting_tokens=sum(stats.waiting_tokens for stats in reported) + local_tokens,
            credit_queue_requests=self.credit_queue.num_requests - local_requests,
            credit_queue_tokens=self.credit_queue.num_tokens - local_tokens,
            credit_tokens=self.promised_tokens(),
            free_blocks=sum(stats.free_blocks for stats in reported),
            total_blocks=total_blocks,
            state=state,
            progress=sum(stats.num_steps + stats.bytes_sent for stats in reported),
            longest_step_seconds=max(
                engine.stall_watch.longest_step_seconds for engine in self.engines
            ),
            busy_ratio=busy_ratio,
            memory_bandwidth_ratio=memory_ratio,
            used_blocks=sum(stats.used_blocks for stats in reported),
            num_transfers=sum(stats.num_transfers for stats in reported),
            kv_bytes=sum(stats.bytes_sent + stats.bytes_received for stats in reported),
            remote_prefills=self.num_prefills["remote"],
            local_prefills=self.num_prefills["local"],
            tiers=tier_loads(reported),
            adapters=self.adapters,
        )

    @property
    def adapters(self) -> dict[str, str]:
        """Fingerprints of those that were loaded while an engine here runs, by name."""
        return {
            name: weights
            for engine in self.engines
            for name, weights in engine.client.adapters.resident.items()
        }

    def takes(self, spec: RequestSpec) -> bool:
        """True if this new request of a client may run here."""
        return self.takes_new and spec.runs_with(self.adapters)

    def matched_blocks(self, hashes: Sequence[bytes], num_own: int) -> int:
        """Leading blocks that this worker has, and has credit for in a store that it shares."""
        store = self.load().store
        return credited(num_own, self.blocks.match_store(store, hashes) if store else 0)

    @property
    def stopped_tiers(self) -> list[StoppedTier]:
        stats = (engine.client.stats for engine in self.engines)
        return list(stopped_tiers(each for each in stats if each is not None))

    async def reports(self) -> AsyncGenerator[Report, None]:
        """A snapshot, then load and cache changes each second and state change."""
        announced = asyncio.Event()
        self._listeners[announced] = []
        try:
            yield Report(load=self.load(), stored=tuple(self.engines.hashes()), snapshot=True)
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(announced.wait(), REPORT_SECONDS)
                announced.clear()
                changes, self._listeners[announced] = self._listeners[announced], []
                stored, removed, is_whole = merge(changes)
                yield Report(
                    load=self.load(),
                    stored=tuple(stored),
                    removed=tuple(removed),
                    snapshot=is_whole,
                )
        finally:
            del self._listeners[announced]

    def _waiting_for_blocks(self) -> tuple[int, int]:
        """Requests and tokens that wait for this worker, not for prefill."""
        queue = self.credit_queue
        if self._block_waiters and all(
            head in self._block_waiters for head in queue.heads(REQUESTING_HEADS)
        ):
            return queue.num_requests, queue.num_tokens
        return len(self._block_waiters), sum(
            queue.tokens(request_id) for request_id in self._block_waiters
        )

    def _export_engines(self) -> None:
        metrics = self.metrics
        metrics.engine_stalled.set(
            any(engine.client.stalled is not None for engine in self.engines)
        )
        for rank in self.engines.lost:
            metrics.engine_up.labels(str(rank)).set(0)
        for engine in self.engines:
            metrics.engine_up.labels(str(engine.rank)).set(engine.serves)

    def _export_queues(self) -> None:
        metrics = self.metrics
        metrics.block_size = lambda: self.block_size
        metrics.num_requests_waiting.set_function(
            lambda: self.load().num_waiting - self.num_waiting_for_prefix
        )
        metrics.prefill_queue_requests.set_function(lambda: self._prefill_queue()[0])
        metrics.prefill_queue_tokens.set_function(lambda: self._prefill_queue()[1])

    def _prefill_queue(self) -> tuple[int, int]:
        load = self.load()
        if self.role == "prefill":
            return load.num_waiting, load.waiting_tokens
        return load.credit_queue_requests, load.credit_queue_tokens

    def _on_blocks(self, _: Engine, events: BlockEvents) -> None:
        for changes in self._listeners.values():
            changes.append(events)

    def _on_stats(self, engine: Engine, stats: EngineStats) -> None:
        for its_engine, needed, future in self._block_waiters.values():
            if its_engine is engine and stats.free_blocks >= needed and not future.done():
                future.set_result(None)


def merge(events: list[BlockEvents]) -> tuple[list[bytes], list[bytes], bool]:
    """The net effect of several events; removed wins within one."""
    final: dict[bytes, bool] = {}
    is_whole = False
    for event in events:
        if event.is_cleared:
            final, is_whole = {}, True
        final.update(dict.fromkeys(event.stored, True))
        final.update(dict.fromkeys(event.removed, False))
    removed = [] if is_whole else [h for h, stored in final.items() if not stored]
    return [h for h, stored in final.items() if stored], removed, is_whole
