"""Statistics and pongs of one rank of a stock engine, from its numbers and our request counts.

Changed numbers count as progress.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

from pdcluster_worker.messages.block_hash import request_hashes
from pdcluster_worker.messages.engine import EngineOutput, EngineStats, Pong
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.stock_engine.cache_events import CacheEvents
from pdcluster_worker.stock_engine.engine_load import Fetches, StockLoad
from pdcluster_worker.stock_engine.metrics_page import Scrape, StockMetrics

KEPT_SECONDS = 600.0
"""Longest time of unchanged metrics that is tolerated while peers fetch KV."""

REPORT_SECONDS = 0.1
"""Minimum between two statistics; the last change is always reported."""

_SEQUENCES = 256
"""vLLM's smallest `--max-num-seqs` on an accelerator, where it chooses by itself."""


class Reports:
    """emit: receives statistics and pongs."""

    def __init__(
        self,
        page: StockMetrics,
        rank: int,
        emit: Callable[[Sequence[EngineOutput]], None],
        *,
        max_sequences: int,
    ) -> None:
        first = page.first[rank]
        self.load = StockLoad(time.monotonic)
        self.cache = CacheEvents(first.block_size)
        self.fetches = Fetches()
        self.on_page: Callable[[], None] = lambda: None
        # True from a stall until it recovers: to be idle is then no sign of progress.
        self.has_stalled: Callable[[], bool] = lambda: False
        self.page = page
        self._rank = rank
        self._first = self._scrape = first
        self._emit = emit
        self._max_sequences = max_sequences
        self._scraped_at = self._changed_at = time.monotonic()
        self._is_pinged = self._keeps = False
        page.readers.append(self)
        self._num_inputs = 0
        self._embeddings = count()
        self._due: asyncio.TimerHandle | None = None
        self._tokens_then = 0

    # --- called by the engine ---------------------------------------------------------------

    def taken(self) -> None:
        self._num_inputs += 1
        self.changed()

    def changed(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(REPORT_SECONDS, self.report)
        if self.is_busy:
            self.page.wake()

    @contextmanager
    def embedding(self, inputs: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Count inputs while the engine embeds them; see `CountEmbeddings`.

        Of several ranks vLLM chooses one by itself, so no rank is expected to make progress.
        """
        names = [f"embedding-{next(self._embeddings)}" for _ in inputs]
        is_watched = len(self.page.first) == 1
        for name, num_tokens in zip(names, inputs, strict=True):
            self.load.begun(name, num_tokens, is_new=False, is_watched=is_watched)
        self.changed()
        try:
            yield partial(self.load.embedded, names)
        finally:
            for name in names:
                self.load.ended(name)
            self.changed()

    def kept(self) -> None:
        self._keeps = True
        self._scraped_at = 0.0

    def answer_ping(self) -> None:
        """Answer a ping, once the page can be read."""
        self._is_pinged = self.page.is_silent
        if not self._is_pinged:
            is_to_step = self.load.is_to_step and not self._waits_for_kept
            has_work = is_to_step or self._runs_forgotten or self.has_stalled()
            self._emit([Pong(self.load.num_steps, has_work)])

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._first.block_size)

    def has_space(self, num_blocks: int) -> bool:
        """Return whether a request with that many blocks fits; an idle engine always has space."""
        is_empty = not self.load.num_slots and not self._keeps
        return is_empty or (self._has_slot and num_blocks <= self._free_blocks)

    def can_begin(self, num_tokens: int) -> bool:
        """Return whether a prompt would wait for no other request to end."""
        return self.has_space(self.num_blocks(num_tokens))

    @property
    def _free_blocks(self) -> int:
        """Free blocks, less those of queued prompts and expected transfers."""
        load, scrape, when = self.load, self._scrape, self._scraped_at
        num_prompts = max(0, scrape.num_queued - scrape.fetches_to_start)
        num_fetches = scrape.fetches_to_start if scrape.has_fetch_stages else scrape.num_queued
        queued = load.queued_tokens(when, num_fetches, num_prompts)
        coming = self.num_blocks(queued + load.tokens_since(when)) + load.reserved_blocks
        return max(0, self._first.num_blocks - scrape.used_blocks - coming)

    @property
    def _has_slot(self) -> bool:
        return self.load.num_slots < self._max_sequences

    @property
    def _fetches_to_start(self) -> int:
        """Fetches whose time is not to count yet: without stages all of them, while any request is
        queued or none could start, since which ones wait is not said.
        """
        scrape = self._scrape
        if scrape.has_fetch_stages:
            return scrape.fetches_to_start
        is_full = scrape.num_running >= min(self._max_sequences, _SEQUENCES)
        return len(self.fetches) if scrape.num_queued or is_full else 0

    @property
    def _runs_forgotten(self) -> bool:
        """True if it still says that it runs what was aborted, as one that hangs does for good."""
        return not self.load.has_work and self._scrape.num_running > 0

    @property
    def _waits_for_kept(self) -> bool:
        """True if a prompt waits only for KV that is kept for peers, and the page still changes."""
        scrape = self._scrape
        is_still = time.monotonic() - self._changed_at >= KEPT_SECONDS
        is_queue = scrape.num_queued > 0 and not scrape.num_running
        needed = self.num_blocks(max(self.load.to_prefill(), default=0))
        does_fit = needed <= self._first.num_blocks - scrape.used_blocks
        return self._keeps and is_queue and not does_fit and not is_still

    def expected_hit(self, spec: RequestSpec) -> int:
        """Tokens of a prompt in the prefix cache."""
        size = self._first.block_size
        if not len(self.cache) or spec.num_tokens <= size:
            return 0
        matched = self.cache.matched(request_hashes(spec, size))
        return min(matched, (spec.num_tokens - 1) // size) * size

    async def numbers(self) -> Scrape:
        """As they are now.  Raises HttpFailedError."""
        return (await self.page.fetch())[self._rank]

    # --- reading its page -------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.load.has_work or self._keeps or self._runs_forgotten

    def read(self, scrape: Scrape, requested_at: float) -> None:
        self._progress(scrape)
        self._keeps = self._keeps and scrape.used_blocks > 0
        if scrape != self._scrape:
            self._changed_at = requested_at
        self._scrape, self._scraped_at = scrape, requested_at
        self.fetches.seen(self._fetches_to_start, scrape.fetches_complete, requested_at)
        if self._is_pinged:
            self.answer_ping()
        self.on_page()
        self.report()

    def _progress(self, scrape: Scrape) -> None:
        """Count a step where the page has changed without a token."""
        made = self.load.generation_tokens
        is_due = self.load.has_work or self.has_stalled()
        if is_due and made == self._tokens_then and scrape != self._scrape:
            self.load.num_steps += 1
        self._tokens_then = made

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()

    # --- statistics -------------------------------------------------------------------------

    def report(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._emit([self._stats()])

    def _stats(self) -> EngineStats:
        load, scrape, first = self.load, self._scrape, self._first
        steps, batches = load.take_steps()
        to_prefill = load.to_prefill()
        free = self._free_blocks
        receiving = min(load.reserved_blocks, first.num_blocks - free)
        return EngineStats(
            num_running=load.num_running,
            num_waiting=len(to_prefill),
            waiting_tokens=sum(to_prefill),
            num_receiving=load.num_receiving,
            blocks={
                "free": free,
                "in_use": first.num_blocks - free - receiving,
                "receiving": receiving,
            },
            free_blocks=free if self._has_slot else 0,
            fences_overdue=0,
            busy_seconds=load.busy_seconds,
            overhead_seconds=0.0,
            num_steps=load.num_steps,
            steps=steps,
            prompt_tokens=load.prompt_tokens,
            prefill_tokens=load.prefill_tokens,
            generation_tokens=load.generation_tokens,
            prefill_seconds=load.prefill_seconds,
            decode_seconds=load.decode_seconds,
            prefix_query_tokens=scrape.prefix_query_tokens - first.prefix_query_tokens,
            prefix_hit_tokens=scrape.prefix_hit_tokens - first.prefix_hit_tokens,
            preemptions=scrape.preemptions - first.preemptions,
            bytes_sent=0,
            bytes_received=int(scrape.bytes_received - first.bytes_received),
            num_transfers=load.num_receiving + int(self._keeps and not load.has_work),
            num_inputs=self._num_inputs,
            batches=batches,
        )
