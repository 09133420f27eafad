"""Inputs of a decode policy; counts as last reported, plus what was sent since (`active_load`)."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class RequestSize:
    """prompt_tokens: all that need KV before the first new token."""

    prompt_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return max(1, -(-self.prompt_tokens // self.block_size))


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A struct, because each request makes one of every worker."""

    key: str
    num_requests: int = 0
    is_self: bool = False
    matched_blocks: int = 0  # leading blocks of the prompt in the worker's prefix cache
    is_recent: bool = False  # the first block of the prompt was sent there recently
    prefill_tokens: int = 0  # prompt tokens queued there
    decode_blocks: int = 0
    total_blocks: int = 0  # 0 = unknown
    busy_ratio: float = 0.0  # share of time in which its GPU or engine computes
    memory_bandwidth_ratio: float = 0.0
    taint: float = 1.0  # factor of its cost, above 1 after a failure

    @property
    def kv_occupancy_ratio(self) -> float:
        return min(1.0, self.decode_blocks / self.total_blocks) if self.total_blocks else 0.0

    @property
    def free_blocks(self) -> int | None:
        """None = unknown."""
        return max(0, self.total_blocks - self.decode_blocks) if self.total_blocks else None
