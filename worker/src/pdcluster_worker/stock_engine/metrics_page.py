"""vLLM's `/metrics`: its numbers by rank, and the loop that reads them for all ranks at once.

A refused connection is the end of the engine.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0
IDLE_SECONDS = 5.0

_SAMPLE = re.compile(rb"^(?:vllm:)?([a-z_]+)(?:\{(.*)\})? ([-+.0-9eE]+|NaN|[+-]Inf)$", re.MULTILINE)
_LABEL = re.compile(rb'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Scrape:
    """Numbers of one rank; one that the engine does not say is 0."""

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
    has_fetch_stages: bool = False  # vLLM 0.32 and later say the two next ones
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
_TOKENS, _CONCURRENCY = "kv_cache_size_tokens", "kv_cache_max_concurrency"
_ROUNDING = 1e-6
_REALS = ("kv_usage", "transfer_seconds", "started_seconds")


def read_numbers(page: bytes) -> Scrape:
    return read_ranks(page, 1)[0]


def read_ranks(page: bytes, num_ranks: int) -> list[Scrape]:
    """Numbers of each rank, by the label `engine`; what has none is of all.

    Values of one name with several other labels are summed.
    """
    values = [dict.fromkeys(_FIELDS.values(), 0.0) for _ in range(num_ranks)]
    infos: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    for match in _SAMPLE.finditer(page):
        if (name := match[1].decode()) not in _NAMES:
            continue
        labels = {key.decode(): text.decode() for key, text in _LABEL.findall(match[2] or b"")}
        kind = labels.get("stage") or labels.get("reason") or labels.get("source", "")
        field = _FIELDS.get((name, kind))
        engine = labels.get("engine", "")
        for rank in range(num_ranks):
            if num_ranks > 1 and engine not in ("", str(rank)):
                continue
            if name == "cache_config_info":
                infos[rank] = labels
            if field is not None:
                values[rank][field] += float(match[3])
    has_stages = b"num_requests_kv_fetch_by_stage{" in page
    blocks = [_num_blocks(info, num_ranks) for info in infos]
    return [_scrape(*each, has_stages) for each in zip(values, infos, blocks, strict=True)]


def _num_blocks(info: dict[str, str], num_ranks: int) -> int:
    """Blocks of one rank, as tokens take them.

    vLLM gives each rank the sum of all, and counts blocks of every group of layers (0.30 to 0.32,
    `v1/engine/core_client.py`); its capacity in tokens, as so many requests of the greatest length,
    is that of a rank.
    """
    size, tokens = _integer(info.get("block_size", "")), _integer(info.get(_TOKENS, ""))
    requests = _real(info.get(_CONCURRENCY, ""))
    if not (size and tokens and requests >= 1):
        return _integer(info.get("num_gpu_blocks", "")) // num_ranks
    length = math.ceil(tokens / requests - _ROUNDING)
    return math.floor(requests * -(-length // size) + _ROUNDING)


def _scrape(
    values: dict[str, float], info: dict[str, str], num_blocks: int, has_stages: bool
) -> Scrape:
    numbers = {name: value if name in _REALS else int(value) for name, value in values.items()}
    sizes = {
        "num_blocks": num_blocks,
        "block_size": _integer(info.get("block_size", "")),
        "prefix_caching": info.get("enable_prefix_caching") == "True",
        "has_fetch_stages": has_stages,
    }
    return msgspec.convert(numbers | sizes, Scrape)


def _integer(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class PageReader(Protocol):
    """One rank.  is_busy: its numbers change."""

    @property
    def is_busy(self) -> bool: ...

    def read(self, scrape: Scrape, requested_at: float) -> None: ...


class StockMetrics:
    """first: when it was ready, by rank.  on_gone: called once at its end or restart."""

    def __init__(
        self,
        http: StockClient,
        first: Sequence[Scrape],
        on_gone: Callable[[str], None],
        path: str = "/metrics",
        read: Callable[[bytes, int], list[Scrape]] = read_ranks,
    ) -> None:
        self.first = first
        self.readers: list[PageReader] = []  # by rank
        self.is_silent = False
        self._http = http
        self._on_gone = on_gone
        self._path, self._read = path, read
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Read it in `BUSY_SECONDS` if it is idle: the engine's first token would wait for it."""
        self._wake.set()

    async def fetch(self) -> list[Scrape]:
        """By rank.  Raises HttpFailedError."""
        return self._read(await self._http.get(self._path), len(self.first))

    async def is_alive(self, reason: str) -> bool:
        """Check /health; an engine that does not answer is reported gone, for `reason`."""
        try:
            await self._http.get_patiently("/health")
        except HttpFailedError as e:
            self._on_gone(f"{reason}, and {e}")
            return False
        return True

    async def run(self) -> None:
        while True:
            await self._poll()
            if not self._is_busy:
                self._wake.clear()
                with suppress(TimeoutError):  # wait_for may lose a cancellation
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._wake.wait()
            if self._is_busy:
                await asyncio.sleep(BUSY_SECONDS)

    @property
    def _is_busy(self) -> bool:
        return self.is_silent or any(reader.is_busy for reader in self.readers)

    async def _poll(self) -> None:
        requested_at = time.monotonic()
        try:
            scrapes = await self.fetch()
        except HttpFailedError as e:
            if e.is_refused:
                self._on_gone(f"it does not listen any more: {e}")
            elif not self.is_silent:
                logger.warning("the engine does not show its numbers reason=%s", e)
            self.is_silent = True
            return
        self.is_silent = False
        if scrapes[0].started_seconds != self.first[0].started_seconds:
            self._on_gone("it was started again")
            return
        for reader, scrape in zip(self.readers, scrapes, strict=True):
            reader.read(scrape, requested_at)
