"""Blocks of one request: what it needs, what it finds in the prefix cache, what it holds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import TransferTarget


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def first_live_block(num_computed_tokens: int, settings: EngineSettings) -> int:
    """Index of the first block that a token at position `num_computed_tokens` or later sees."""
    if settings.window is None:
        return 0
    return max(0, num_computed_tokens - settings.window + 1) // settings.block_size


def blocks_before(settings: EngineSettings) -> int | None:
    """Blocks before a block's first token that hold all of its window; None: every one."""
    return None if settings.window is None else ceil_div(settings.window - 1, settings.block_size)


def most_blocks(num_tokens: int, settings: EngineSettings) -> int:
    """Most blocks that a request holds at once: of its largest chunk, and the window before it."""
    num_blocks = ceil_div(num_tokens, settings.block_size)
    if settings.window is None:
        return num_blocks
    num_seen = settings.window - 1 + settings.max_batched_tokens
    return min(num_blocks, (num_seen + settings.block_size - 2) // settings.block_size + 1)


def most_tokens(settings: EngineSettings) -> int | None:
    """Most tokens of one request that the KV blocks can hold; None: any number of them.

    Without a window one block is spared: KV that a peer hands over needs room for one token more.
    With one none is: that token is within the length that the blocks hold.
    """
    if settings.window is None:
        return (settings.num_blocks - 1) * settings.block_size
    if most_blocks(settings.max_model_len, settings) <= settings.num_blocks:
        return None
    return settings.num_blocks * settings.block_size


def too_large(num_tokens: int, settings: EngineSettings) -> str | None:
    """Reason why one request of that many tokens never fits here; None when it fits."""
    needed = most_blocks(num_tokens, settings)
    if needed <= settings.num_blocks:
        return None
    capacity = settings.num_blocks * settings.block_size
    return (
        f"{num_tokens} tokens do not fit into the KV cache of {capacity} tokens: they need "
        f"{needed} blocks at once "
        f"of {settings.num_blocks}: raise engine.kvCacheMemory or shorten the request"
    )


@dataclass(frozen=True, slots=True)
class Reservation:
    # Index in its table of the first block that it holds; the window has left others.
    first_block: int
    hits: list[int]  # prefix blocks that it would share, in order, from `first_block` on
    num_new: int  # private blocks after them, to begin with
    quota: int  # most blocks that it holds until `num_tokens` of it have theirs
    num_tokens: int  # tokens that it is to have room for
    num_computed_tokens: int  # tokens that need not be computed here
    num_hit_tokens: int  # tokens found in the prefix cache
    # What it takes from `BlockPool.num_available`, hits that no request holds among it, and what
    # must stay there: the watermark, and what is promised to others.
    num_needed: int


class BlockTables:
    """Fills and empties `EngineRequest.block_table` from one pool."""

    def __init__(self, settings: EngineSettings, pool: BlockPool) -> None:
        self.pool = pool
        self._settings = settings
        self._block_size = settings.block_size
        self._prefix_caching = settings.prefix_caching
        self._num_kept = settings.num_kept_blocks
        self.num_awaited = 0  # that requests take once their prefix is read from a tier
        self._holding: set[EngineRequest] = set()
        # Those that have not taken all blocks of their prompt yet.
        self._growing: dict[EngineRequest, Reservation] = {}

    def num_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self._block_size)

    @property
    def num_promised(self) -> int:
        return sum(self._promise(request) for request in self._growing)

    @property
    def num_kept(self) -> int:
        """Blocks that are for no newcomer: the watermark, and those awaited."""
        return (self._num_kept if self._holding else 0) + self.num_awaited

    def reservation(
        self, request: EngineRequest, num_tokens: int, *, received: bool = False
    ) -> Reservation:
        """Blocks for `num_tokens` of a request that holds none; received: a peer computes them."""
        size = self._block_size
        first, hits = self._match(request)
        num_hit = first + len(hits)
        if received:
            live = min(
                first_live_block(request.num_tokens, self._settings),
                (request.num_tokens - 1) // size,
            )
            first, hits = max(first, live), hits[max(0, live - first) :]
        num_computed = (first + len(hits)) * size
        at_once = (
            num_tokens
            if received or self._settings.window is None
            else min(num_tokens, num_computed + self._settings.max_batched_tokens)
        )
        num_new = self.num_blocks(at_once) - first - len(hits)
        quota = len(hits) + num_new
        if at_once < num_tokens:
            quota = max(quota, self._quota(request, num_tokens, first))
        needed = self._needed(hits, num_new, quota, grows=at_once < num_tokens)
        return Reservation(
            first, hits, num_new, quota, num_tokens, num_computed, num_hit * size, needed
        )

    def cut(self, reservation: Reservation, num_tokens: int) -> Reservation:
        """The same with blocks for so many tokens; with a window the rest stays promised."""
        num_new = self.num_blocks(num_tokens) - reservation.first_block - len(reservation.hits)
        if self._settings.window is not None:
            return replace(reservation, num_new=num_new)
        quota = len(reservation.hits) + num_new
        return replace(reservation, num_new=num_new, quota=quota, num_tokens=num_tokens)

    def take(self, request: EngineRequest, reservation: Reservation) -> None:
        assert not request.block_table, f"request {request.request_id} holds blocks already"
        self.pool.acquire(reservation.hits)
        nulls = [self._settings.null_block] * reservation.first_block
        request.block_table = [*nulls, *reservation.hits, *self.pool.allocate(reservation.num_new)]
        request.num_null_blocks = reservation.first_block
        request.num_computed_tokens = reservation.num_computed_tokens
        self._holding.add(request)
        if len(request.block_table) < self.num_blocks(reservation.num_tokens):
            self._growing[request] = reservation

    def num_available_to(self, request: EngineRequest) -> int:
        if len(self._growing) == (request in self._growing):
            return self.pool.num_available
        own = self._promise(request)
        others = self.num_promised - own
        return max(own, self.pool.num_available - others - self.pool.num_shares)

    def has_blocks_for_next(self, requests: Iterable[EngineRequest]) -> bool:
        """Return whether each finds a block for its next token: none is preempted."""
        size = self._block_size
        num_short = sum(
            request.num_scheduled_tokens >= len(request.block_table) * size for request in requests
        )
        reserved = self.num_promised + self.pool.num_shares if self._growing else 0
        return num_short == 0 or num_short + reserved <= self.pool.num_available

    def grow(self, request: EngineRequest, num_tokens: int) -> bool:
        """Extend the table to `num_tokens`; False, with nothing taken, when blocks are short."""
        if num_tokens <= len(request.block_table) * self._block_size:
            return True
        missing = self.num_blocks(num_tokens) - len(request.block_table)
        if missing > self.num_available_to(request):
            return False
        request.block_table += self.pool.allocate(missing)
        reserved = self._growing.get(request)
        if reserved is not None and len(request.block_table) >= self.num_blocks(
            reserved.num_tokens
        ):
            del self._growing[request]
        return True

    def grow_for_drafts(self, request: EngineRequest, end: int, num_drafts: int) -> int:
        """Extend the table for drafts from free blocks alone; returns for how many."""
        held = len(request.block_table)
        missing = self.num_blocks(end + num_drafts) - held
        if (
            missing > 0
            and request not in self._growing
            and missing + self._num_kept <= self.num_available_to(request)
        ):
            self.grow(request, end + num_drafts)
            request.num_draft_blocks = len(request.block_table) - held
        return min(num_drafts, len(request.block_table) * self._block_size - end)

    def settle_drafts(self, request: EngineRequest) -> None:
        """Give back blocks that only drafts needed; no step has the request now."""
        extra = min(
            request.num_draft_blocks, len(request.block_table) - self.num_blocks(request.num_tokens)
        )
        request.num_draft_blocks = 0
        if extra > 0:
            self.pool.release(request.block_table[-extra:])
            # Another list, as where blocks leave a window.
            request.block_table = request.block_table[:-extra]

    def advance(self, request: EngineRequest, num_tokens: int) -> None:
        """`num_tokens` more are computed: hash full blocks, give back those outside the window."""
        computed = request.num_computed_tokens
        first = computed // self._block_size
        request.num_computed_tokens = computed + num_tokens
        last = (computed + num_tokens) // self._block_size
        if self._prefix_caching and first != last:
            request.extend_hashes(self._block_size)
            for index in range(first, last):
                self.pool.cache(request.block_table[index], request.block_hashes[index])
        if self._settings.window is not None:
            self._give_back(request)

    def release(self, request: EngineRequest) -> None:
        self.pool.release(request.block_table[request.num_null_blocks :])
        if request.status is not Status.RECEIVING:  # of such a one a peer computes
            request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.block_table = []
        request.num_null_blocks = 0
        request.num_draft_blocks = 0
        request.num_computed_tokens = 0
        self._holding.discard(request)
        self._growing.pop(request, None)

    def _match(self, request: EngineRequest) -> tuple[int, list[int]]:
        """The prefix hit: the index of its first block that is held again, and those blocks."""
        if not self._prefix_caching or request.scores_prompt:
            return 0, []  # a cached position has no logits
        request.extend_hashes(self._block_size)
        limit = (request.num_tokens - 1) // self._block_size
        num_last = blocks_before(self._settings)
        if num_last is None:
            return 0, self.pool.prefix_cache.match(request.block_hashes, limit)
        return self.pool.prefix_cache.match_last(request.block_hashes, limit, num_last)

    def _needed(self, hits: list[int], num_new: int, quota: int, *, grows: bool) -> int:
        kept = self.num_kept
        if grows or self._growing:
            # As if nothing were shared: a shared block given back by one holder is not available,
            # though its holder, which may hold its whole quota now, is then promised another.
            return self.num_promised + self.pool.num_shares + quota + kept
        idle_hits = sum(1 for block_id in hits if self.pool.state(block_id) is BlockState.CACHED)
        return num_new + idle_hits + kept

    def _quota(self, request: EngineRequest, num_tokens: int, first: int) -> int:
        num_blocks = self.num_blocks(num_tokens) - first
        if request.target is None:
            return min(num_blocks, most_blocks(num_tokens, self._settings))
        # What is to be sent stays held, also where the peer asks for more than the last window.
        num_sent = self.num_blocks(num_tokens) - request.target.cached_tokens // self._block_size
        return min(num_blocks, max(num_sent, most_blocks(num_tokens, self._settings)))

    def _promise(self, request: EngineRequest) -> int:
        reserved = self._growing.get(request)
        num_held = len(request.block_table) - request.num_null_blocks
        return 0 if reserved is None else max(0, reserved.quota - num_held)

    def _give_back(self, request: EngineRequest) -> None:
        first = first_live_block(request.num_computed_tokens, self._settings)
        if request.target is not None:
            first = min(first, request.target.cached_tokens // self._block_size)
        start = request.num_null_blocks
        if first <= start:
            return
        self.pool.release(request.block_table[start:first])
        # Another list: a copy of the old one is made again from its beginning.
        request.block_table = [self._settings.null_block] * first + request.block_table[first:]
        request.num_null_blocks = first


def refusal(request: EngineRequest, settings: EngineSettings, num_more: int) -> str | None:
    """Reason why it can never run; num_more: tokens beyond the known ones that need room."""
    num_tokens = request.num_tokens
    if num_tokens == 0:
        return "the prompt is empty: send at least one token"
    if num_tokens >= settings.max_model_len:
        return (
            f"{num_tokens} tokens leave no room for output within "
            f"max_model_len={settings.max_model_len}: shorten the prompt"
        )
    if request.num_output_tokens >= request.sampling.max_tokens:
        return (
            f"max_tokens={request.sampling.max_tokens} are made already: nothing is left to "
            "generate"
        )
    if (
        request.target is not None
        and (reason := _target_refusal(num_tokens, request.target, settings)) is not None
    ):
        return reason
    return too_large(num_tokens + num_more, settings)


def _target_refusal(
    num_tokens: int, target: TransferTarget, settings: EngineSettings
) -> str | None:
    num_cached, num_blocks = target.cached_tokens, len(target.block_ids)
    block_size = settings.block_size
    if num_cached % block_size or not 0 <= num_cached < num_tokens:
        return (
            f"target.cached_tokens={num_cached} is not a multiple of {block_size} below the "
            f"request's {num_tokens} tokens"
        )
    expected = ceil_div(num_tokens, block_size) - num_cached // block_size
    if num_blocks != expected:
        return f"target.block_ids has {num_blocks} blocks, the request needs {expected}"
    if num_blocks > settings.num_blocks:  # what is sent stays held until then, whatever the window
        return (
            f"target.block_ids has {num_blocks} blocks, and there are {settings.num_blocks} here: "
            "raise engine.kvCacheMemory"
        )
    return None
