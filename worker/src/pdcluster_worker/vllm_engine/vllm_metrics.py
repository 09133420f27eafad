"""Parses vLLM's `/metrics`; a missing name is 0, since the version is checked."""

import re
from dataclasses import dataclass

import msgspec

_SAMPLE = re.compile(rb"^(?:vllm:)?([a-z_]+)(?:\{(.*)\})? ([-+.0-9eE]+|NaN|[+-]Inf)$", re.MULTILINE)
_LABEL = re.compile(rb'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Scrape:
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
    external_tokens: int = 0  # prompt tokens whose KV came from a peer
    bytes_received: int = 0  # by NIXL, summed over ranks
    transfer_seconds: float = 0.0  # by NIXL, summed over ranks
    fetches_to_start: int = 0  # queued requests with KV from a peer
    fetches_complete: int = 0  # the same, with KV that has arrived
    started_seconds: float = 0.0  # start of the process; identifies it

    @property
    def used_blocks(self) -> int:
        """Blocks that are neither free nor only cached."""
        return round(self.kv_usage * self.num_blocks)


_COUNTS = {
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "preemptions": "num_preemptions_total",
    "prefix_query_tokens": "prefix_cache_queries_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "external_tokens": "external_prefix_cache_hits_total",
    "bytes_received": "nixl_bytes_transferred_sum",
}
_REALS = {
    "kv_usage": "kv_cache_usage_perc",
    "transfer_seconds": "nixl_xfer_time_seconds_sum",
    "started_seconds": "process_start_time_seconds",
}
_FETCHES = "num_requests_kv_fetch_by_stage"
_STAGES = {"waiting_to_start": "fetches_to_start", "completed_waiting": "fetches_complete"}
_WAITING = "num_requests_waiting_by_reason"
_QUEUED = "capacity"
_INFO = "cache_config_info"
_READ = {*_COUNTS.values(), *_REALS.values()}


def read_numbers(page: bytes) -> Scrape:
    """Values of one name with several labels are summed."""
    values: dict[str, float] = {}
    info: dict[str, str] = {}
    stages = {"num_queued": 0, **dict.fromkeys(_STAGES.values(), 0)}
    for match in _SAMPLE.finditer(page):
        name = match[1].decode()
        if name in _READ:
            values[name] = values.get(name, 0.0) + float(match[3])
        elif name == _FETCHES:
            field = _STAGES.get(_labels(match[2]).get("stage", ""))
            if field is not None:
                stages[field] += int(float(match[3]))
        elif name == _WAITING and _labels(match[2]).get("reason") == _QUEUED:
            stages["num_queued"] += int(float(match[3]))
        elif name == _INFO:
            info = _labels(match[2])
    counts = {field: int(values.get(name, 0.0)) for field, name in _COUNTS.items()}
    reals = {field: values.get(name, 0.0) for field, name in _REALS.items()}
    sizes = {
        "num_blocks": _integer(info.get("num_gpu_blocks")),
        "block_size": _integer(info.get("block_size")),
        "prefix_caching": info.get("enable_prefix_caching") == "True",
    }
    return msgspec.convert(counts | stages | sizes | reals, Scrape)


def _labels(text: bytes | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in _LABEL.findall(text or b"")}


def _integer(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
