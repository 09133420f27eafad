"""The engines of one worker: the choice among them for a request, and their state together."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import (
    AskSnapshot,
    BlockEvents,
    EngineInput,
    EngineReady,
    EngineStats,
    Receive,
    ReceiveReady,
    ReceiveRefused,
)
from pdcluster_worker.messages.requests import RequestSpec, TransferTarget
from pdcluster_worker.peers.records import EngineRecord, EngineState
from pdcluster_worker.routing.prefix_index import EventOrder, GapCheck, PrefixIndex
from pdcluster_worker.serving.engines.client import (
    EngineClient,
    EngineDiedError,
    EngineStalledError,
    RequestOutputs,
)
from pdcluster_worker.serving.engines.stall_watch import StallWatch

logger = logging.getLogger(__name__)

SENT_SECONDS = 5.0
"""Time for which an engine counts as having the blocks of a prompt that it was sent: its cache
events come later.
"""

MAX_SENT_BLOCKS = 100_000

WAITING_WEIGHT = 4
"""A request that waits counts as so many that run."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process that has loaded."""

    client: EngineClient
    facts: EngineReady
    kv_address: str  # host:port where peers write its KV; of its first rank
    rank: int = 0  # among the engines of its worker, from 0; one that is started again keeps it
    # How long its steps take, and whether it has stalled.
    stall_watch: StallWatch = field(init=False)
    order: EventOrder = field(default_factory=EventOrder)  # of its block events

    def __post_init__(self) -> None:
        self.stall_watch = StallWatch(
            *(time.monotonic, self.facts.longest_step_seconds, self.facts.own_stop_seconds)
        )
        self.client.on_pong = lambda pong: self.stall_watch.on_pong(pong)
        self.client.on_stats.append(lambda stats: self.stall_watch.on_stats(stats))

    @property
    def kv_addresses(self) -> list[str]:
        host = self.kv_address.rpartition(":")[0]
        return [self.kv_address, *(f"{host}:{port}" for port in self.facts.kv_ports[1:])]

    @property
    def serves(self) -> bool:
        return self.client.problem is None

    def has_capacity(self, num_tokens: int, num_cached: int) -> bool:
        """Return whether its free blocks suffice, as last reported.  num_cached: blocks."""
        needed = -(-num_tokens // self.facts.geometry.block_size) - num_cached
        stats = self.client.stats
        return stats is None or stats.free_blocks >= max(1, needed)

    @property
    def score(self) -> int:
        """Its load: of its last report, and requests that this report does not know."""
        stats, num_unknown = self.client.stats, self.client.num_unknown
        if stats is None:
            return WAITING_WEIGHT * num_unknown
        return (
            WAITING_WEIGHT * (stats.num_waiting + num_unknown)
            + stats.num_running
            + stats.num_receiving
        )


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """An engine chosen for a request, and the outputs of the request there."""

    engine: Engine
    outputs: RequestOutputs

    def send(self, message: EngineInput) -> None:
        """Send a message to the engine.  Raises EngineDiedError."""
        self.engine.client.send(message)

    def check(self) -> None:
        """Raise EngineDiedError or EngineStalledError when the engine does not serve."""
        self.engine.client.check()

    async def receive(self, spec: RequestSpec) -> ReceiveReady | ReceiveRefused:
        """Ask the engine for blocks that a peer may write.  Raises RequestError."""
        self.send(Receive(spec))
        answer = await self.outputs.get()
        if not isinstance(answer, ReceiveReady | ReceiveRefused):
            raise RequestError(
                f"the engine answered {type(answer).__name__} to Receive", status=500
            )
        return answer

    def target(self, blocks: ReceiveReady) -> TransferTarget:
        engine = self.engine
        return TransferTarget(
            blocks.epoch,
            engine.facts.engine_id,
            engine.kv_addresses,
            blocks.cached_tokens,
            blocks.block_ids,
        )

    def close(self) -> None:
        self.engine.client.close(self.outputs)


class SentPrompts:
    """Blocks of the prompts that each engine was sent lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When, the oldest first.  The first key of a plain dict that shrinks there is slow to find.
        self._sent: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def add(self, rank: int, hashes: Sequence[bytes]) -> None:
        now = self._clock()
        for block in hashes:
            self._sent[rank, block] = now
            self._sent.move_to_end((rank, block))
        while self._sent:
            since = next(iter(self._sent.values()))
            if now - since < SENT_SECONDS and len(self._sent) <= MAX_SENT_BLOCKS:
                return
            self._sent.popitem(last=False)

    def match(self, rank: int, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` among them."""
        since = self._clock() - SENT_SECONDS
        is_sent = (self._sent.get((rank, block), since) > since for block in hashes)
        return sum(takewhile(bool, is_sent))


class Engines:
    """Engines that have loaded, by rank."""

    def __init__(self, *engines: Engine) -> None:
        self.on_stats: list[Callable[[Engine, EngineStats], None]] = []
        self.on_blocks: list[Callable[[Engine, BlockEvents], None]] = []
        # Called with the engine of each request that begins.
        self.on_open: Callable[[Engine], None] = lambda _: None
        # By rank, those that died and are to come again, and why.
        self.lost: dict[int, tuple[Engine, str]] = {}
        self._engines: dict[int, Engine] = {}
        self._blocks = PrefixIndex()
        self._sent = SentPrompts()
        self._last = 0  # rank of the last request
        for engine in engines:
            self.add(engine)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def first(self) -> Engine:
        return next(iter(self))

    @property
    def problem(self) -> str | None:
        """Reason why no engine serves; None while one does."""
        if any(engine.serves for engine in self):
            return None
        reasons = [engine.client.problem or "" for engine in self]
        return reasons[0] if reasons else "no engine is left"

    @property
    def is_stalled(self) -> bool:
        """True if no engine serves, and at least one stalls and may recover."""
        return self.problem is not None and not all(engine.client.is_lost for engine in self)

    @property
    def shortfall(self) -> str | None:
        """Engines that do not serve while others do, in words; None when all or none serve."""
        if self.problem is not None:
            return None
        down = {rank: f"is lost: {reason}" for rank, (_, reason) in self.lost.items()}
        down |= {engine.rank: reason for engine in self if (reason := engine.client.problem)}
        reasons = "; ".join(f"engine {rank} {reason}" for rank, reason in sorted(down.items()))
        return (
            f"{len(down)} of {len(self._engines | self.lost)} engines do not serve: {reasons}"
            if down
            else None
        )

    def add(self, engine: Engine) -> None:
        """Take an engine that has loaded, in place of the one that had its rank."""
        self.lost.pop(engine.rank, None)
        self._engines[engine.rank] = engine
        self._engines = dict(sorted(self._engines.items()))
        engine.client.on_stats.append(lambda stats: self._on_stats(engine, stats))
        engine.client.on_blocks.append(lambda events: self._take_blocks(engine, events))

    def remove(self, engine: Engine, reason: str) -> None:
        """Forget one that has died, and the blocks of its prefix cache."""
        self.lost[engine.rank] = engine, reason
        del self._engines[engine.rank]
        gone = list(self._blocks.hashes(_key(engine)))
        self._blocks.drop(_key(engine))
        self._on_changes(engine, BlockEvents([], gone, sequence=0))

    def forget(self, engine: Engine) -> bool:
        if self.lost.get(engine.rank, (None, ""))[0] is not engine:
            return False
        del self.lost[engine.rank]
        return True

    def records(self) -> list[EngineRecord]:
        """Records of several engines in etcd; empty for a single engine."""
        states: dict[Engine, EngineState] = {
            engine: "ready" if engine.serves else "stalled" for engine in self
        }
        states |= {engine: "lost" for engine, _ in self.lost.values()}
        if len(states) == 1:
            return []
        ordered = sorted(states.items(), key=lambda item: item[0].rank)
        return [
            EngineRecord(engine.rank, engine.facts.engine_id, engine.kv_address, state)
            for engine, state in ordered
        ]

    def open(
        self, request_id: str, hashes: Callable[[], Sequence[bytes]], num_tokens: int = 0
    ) -> RequestHandle:
        """Choose an engine for a request, and listen for its outputs.  Raises RequestError.

        num_tokens: of the prompt, for which the engine is to have room.
        """
        if any(engine.client.knows(request_id) for engine in self):
            raise RequestError(
                f"request id {request_id} is already being served",
                status=409,
                code="duplicate_request",
            )
        engine = self._choose(hashes, num_tokens)
        handle = RequestHandle(engine, engine.client.open(request_id))
        self.on_open(engine)
        return handle

    def cached_tokens(self, engine: Engine, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Prefix hit in whole blocks; at least one token is left to compute."""
        block_size = engine.facts.geometry.block_size
        return (
            min(self._blocks.match(_key(engine), hashes), (num_tokens - 1) // block_size)
            * block_size
        )

    def matched_blocks(self, hashes: Sequence[bytes]) -> int:
        return max(self._blocks.match_all(hashes).values(), default=0)

    def hashes(self) -> set[bytes]:
        return set().union(*(self._blocks.hashes(_key(engine)) for engine in self))

    def _choose(self, hashes: Callable[[], Sequence[bytes]], num_tokens: int) -> Engine:
        serving = [engine for engine in self if engine.serves]
        if not serving:
            problem = self.problem or ""
            raise EngineStalledError(problem) if self.is_stalled else EngineDiedError(problem)
        if len(serving) == 1:
            return serving[0]
        # Ties go round, so that idle engines are not filled from the first one on.
        in_turn = sorted(serving, key=lambda engine: engine.rank <= self._last)
        known = hashes()
        matches = {
            engine: max(
                self._blocks.match(_key(engine), known), self._sent.match(engine.rank, known)
            )
            for engine in in_turn
        }
        candidates = [
            engine for engine in in_turn if engine.has_capacity(num_tokens, matches[engine])
        ] or in_turn
        scores = [engine.score for engine in candidates]
        chosen = candidates[choose(scores, [matches[engine] for engine in candidates])]
        self._last = chosen.rank
        self._sent.add(chosen.rank, known)
        return chosen

    def _on_stats(self, engine: Engine, stats: EngineStats) -> None:
        for callback in self.on_stats:
            callback(engine, stats)

    def _take_blocks(self, engine: Engine, events: BlockEvents) -> None:
        """Apply cache events in order; after a gap a snapshot is requested."""
        arrival = engine.order.arrival(events.sequence, is_whole=events.is_cleared)
        if arrival is GapCheck.GET_SNAPSHOT:
            logger.warning(
                "engine %d: missed block events before sequence=%d: asked for all",
                engine.rank,
                events.sequence,
            )
            engine.client.send(AskSnapshot())
        if arrival is not GapCheck.APPLY:
            return
        if events.is_cleared:
            self._blocks.snapshot(_key(engine), events.stored)
            self._on_blocks(
                engine, BlockEvents(sorted(self.hashes()), [], events.sequence, is_cleared=True)
            )
        else:
            self._blocks.apply(_key(engine), events.stored, events.removed)
            self._on_changes(engine, events)

    def _on_changes(self, engine: Engine, events: BlockEvents) -> None:
        """Pass on changes of all caches together: a block that another engine has is not gone."""
        others = [other for other in self if other is not engine]
        gone = [
            block
            for block in events.removed
            if not any(self._blocks.match(_key(other), [block]) for other in others)
        ]
        self._on_blocks(engine, BlockEvents(events.stored, gone, events.sequence))

    def _on_blocks(self, engine: Engine, events: BlockEvents) -> None:
        for callback in self.on_blocks:
            callback(engine, events)


def choose(scores: Sequence[int], matches: Sequence[int]) -> int:
    """Index of the engine for a request.

    The lowest score; of those at most one waiting request above it the one with most blocks of the
    prompt; then the first.

    >>> choose([8, 4, 5], [0, 0, 0]), choose([8, 4, 5], [2, 0, 1]), choose([9, 4, 5], [2, 0, 0])
    (1, 0, 1)
    """
    limit = min(scores) + WAITING_WEIGHT
    near = [index for index, score in enumerate(scores) if score <= limit]
    return min(near, key=lambda index: (-matches[index], scores[index]))


def _key(engine: Engine) -> str:
    return str(engine.rank)
