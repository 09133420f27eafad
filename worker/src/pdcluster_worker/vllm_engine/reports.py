"""Statistics, pongs and health of a vLLM engine, from its /metrics and our request counts.

A changed page counts as progress, a refused connection as the end of the engine.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdcluster_worker.messages.block_hash import block_hashes
from pdcluster_worker.messages.engine import EngineOutput, EngineStats, Pong
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.vllm_engine.cache_events import CacheEvents
from pdcluster_worker.vllm_engine.engine_load import Fetches, VllmLoad
from pdcluster_worker.vllm_engine.http import HttpFailedError, VllmClient

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0
IDLE_SECONDS = 5.0

KEPT_SECONDS = 600.0
"""Longest time of unchanged metrics that is tolerated while peers fetch KV."""

REPORT_SECONDS = 0.1
"""Minimum between two statistics; the last change is always reported."""


_SAMPLE = re.compile(rb"^(?:vllm:)?([a-z_]+)(?:\{(.*)\})? ([-+.0-9eE]+|NaN|[+-]Inf)$", re.MULTILINE)
_LABEL = re.compile(rb'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Scrape:
    """vLLM's `/metrics`; a missing name is 0, since the version is checked."""

    num_blocks: int = 0  # 0 = unknown
    block_size: int = 0  # 0 = unknown
    prefix_caching: bool = False
    kv_usage: float = 0.0  # share of blocks of requests, or kept for a peer
    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0  # not started, fetches included
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_tokens: int = 0  # prompt tokens whose KV came from a peer or from host memory
    host_tokens: int = 0  # the latter of them
    bytes_received: int = 0  # by NIXL, summed over ranks
    transfer_seconds: float = 0.0  # by NIXL, summed over ranks
    fetches_to_start: int = 0  # queued requests with KV from a peer
    fetches_complete: int = 0  # the same, with KV that has arrived
    started_seconds: float = 0.0  # start of the process; identifies it

    @property
    def used_blocks(self) -> int:
        """Blocks that are neither free nor only cached."""
        return round(self.kv_usage * self.num_blocks)


_FIELDS = {
    ("kv_cache_usage_perc", ""): "kv_usage",
    ("num_requests_running", ""): "num_running",
    ("num_requests_waiting", ""): "num_waiting",
    ("num_requests_waiting_by_reason", "capacity"): "num_queued",
    ("num_preemptions_total", ""): "preemptions",
    ("prefix_cache_queries_total", ""): "prefix_query_tokens",
    ("prefix_cache_hits_total", ""): "prefix_hit_tokens",
    ("external_prefix_cache_hits_total", ""): "external_tokens",
    ("prompt_tokens_cached_by_source_total", "host"): "host_tokens",
    ("nixl_bytes_transferred_sum", ""): "bytes_received",
    ("nixl_xfer_time_seconds_sum", ""): "transfer_seconds",
    ("num_requests_kv_fetch_by_stage", "waiting_to_start"): "fetches_to_start",
    ("num_requests_kv_fetch_by_stage", "completed_waiting"): "fetches_complete",
    ("process_start_time_seconds", ""): "started_seconds",
}
"""By name of the sample and its label `stage`, `reason` or `source`."""

_NAMES = {"cache_config_info", *(name for name, _ in _FIELDS)}
_REALS = ("kv_usage", "transfer_seconds", "started_seconds")


def read_numbers(page: bytes) -> Scrape:
    """Values of one name with several other labels are summed."""
    values: dict[str, float] = dict.fromkeys(_FIELDS.values(), 0.0)
    info: dict[str, str] = {}
    for match in _SAMPLE.finditer(page):
        if (name := match[1].decode()) not in _NAMES:
            continue
        labels = {key.decode(): text.decode() for key, text in _LABEL.findall(match[2] or b"")}
        if name == "cache_config_info":
            info = labels
        kind = labels.get("stage") or labels.get("reason") or labels.get("source", "")
        field = _FIELDS.get((name, kind))
        if field is not None:
            values[field] += float(match[3])
    numbers = {name: value if name in _REALS else int(value) for name, value in values.items()}
    sizes = {
        "num_blocks": _integer(info.get("num_gpu_blocks", "")),
        "block_size": _integer(info.get("block_size", "")),
        "prefix_caching": info.get("enable_prefix_caching") == "True",
    }
    return msgspec.convert(numbers | sizes, Scrape)


def _integer(text: str) -> int:
    return int(text) if text.isdigit() else 0


class Reports:
    """emit: receives statistics and pongs.  on_gone: called once at the engine's end or restart."""

    def __init__(
        self,
        http: VllmClient,
        first: Scrape,
        emit: Callable[[Sequence[EngineOutput]], None],
        on_gone: Callable[[str], None],
        *,
        max_sequences: int,
    ) -> None:
        self.load = VllmLoad(time.monotonic)
        self.cache = CacheEvents(first.block_size)
        self.fetches = Fetches()
        self.on_page: Callable[[], None] = lambda: None
        self._http = http
        self._first = self._scrape = first
        self._emit = emit
        self._on_gone = on_gone
        self._max_sequences = max_sequences
        self._scraped_at = self._changed_at = time.monotonic()
        self.is_silent = self._is_pinged = self._keeps = False
        self._num_inputs = 0
        self._wake = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._tokens_then = 0

    # --- called by the engine ---------------------------------------------------------------

    def taken(self) -> None:
        self._num_inputs += 1
        self.changed()

    def changed(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(REPORT_SECONDS, self.report)
        if self.load.has_work or self._keeps:
            self._wake.set()

    def kept(self) -> None:
        self._keeps = True
        self._scraped_at = 0.0

    def answer_ping(self) -> None:
        """Answer a ping, once the page can be read."""
        self._is_pinged = self.is_silent
        if not self.is_silent:
            is_to_step = self.load.is_to_step and not self._waits_for_kept
            self._emit([Pong(self.load.num_steps, is_to_step)])

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
        queued = load.queued_tokens(when, scrape.fetches_to_start, num_prompts)
        coming = self.num_blocks(queued + load.tokens_since(when)) + load.reserved_blocks
        return max(0, self._first.num_blocks - scrape.used_blocks - coming)

    @property
    def _has_slot(self) -> bool:
        return self.load.num_slots < self._max_sequences

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
        tokens, size = [*spec.prompt, *spec.output], self._first.block_size
        if not len(self.cache) or len(tokens) <= size:
            return 0
        matched = self.cache.matched(block_hashes(tokens, size, spec.cache_salt))
        return min(matched, (len(tokens) - 1) // size) * size

    async def is_alive(self, reason: str) -> bool:
        """Check /health; an engine that does not answer is reported gone, for `reason`."""
        try:
            await self._http.get_patiently("/health")
        except HttpFailedError as e:
            self._on_gone(f"{reason}, and {e}")
            return False
        return True

    # --- reading its page -------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._poll()
            is_busy = self.load.has_work or self._keeps or self.is_silent
            try:
                if is_busy:
                    await asyncio.sleep(BUSY_SECONDS)
                else:
                    self._wake.clear()
                    async with asyncio.timeout(IDLE_SECONDS):  # wait_for may lose a cancellation
                        await self._wake.wait()
            except TimeoutError:
                pass

    async def _poll(self) -> None:
        requested_at = time.monotonic()
        try:
            scrape = read_numbers(await self._http.get("/metrics"))
        except HttpFailedError as e:
            if e.is_refused:
                self._on_gone(f"it does not listen any more: {e}")
            elif not self.is_silent:
                logger.warning("the engine does not show its numbers reason=%s", e)
            self.is_silent = True
            return
        self.is_silent = False
        if scrape.started_seconds != self._first.started_seconds:
            self._on_gone("it was started again")
            return
        self._progress(scrape)
        self._keeps = self._keeps and scrape.used_blocks > 0
        if scrape != self._scrape:
            self._changed_at = requested_at
        self._scrape, self._scraped_at = scrape, requested_at
        self.fetches.seen(scrape.fetches_to_start, scrape.fetches_complete, requested_at)
        if self._is_pinged:
            self.answer_ping()
        self.on_page()
        self.report()

    def _progress(self, scrape: Scrape) -> None:
        """Count a step where the page has changed without a token."""
        made = self.load.generation_tokens
        if self.load.has_work and made == self._tokens_then and scrape != self._scrape:
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
