"""Inputs of a decode policy: the request, and each worker that may run it.

Counts are of the worker's last report and of what was sent there since (`routing.active_load`).
"""

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
    """A struct, because each request makes one of every worker.

    matched_blocks: leading blocks of the prompt in the worker's prefix cache.
    is_recent:      the first block of the prompt was sent there recently.
    prefill_tokens: prompt tokens queued there.
    total_blocks:   0 = unknown.
    busy_ratio:     share of time in which its GPU, or else its engine, computes.
    taint:          factor of its cost, above 1 after a failure.
    """

    key: str
    num_requests: int = 0
    is_self: bool = False
    matched_blocks: int = 0
    is_recent: bool = False
    prefill_tokens: int = 0
    decode_blocks: int = 0
    total_blocks: int = 0
    busy_ratio: float = 0.0
    memory_bandwidth_ratio: float = 0.0
    taint: float = 1.0

    @property
    def kv_occupancy_ratio(self) -> float:
        return min(1.0, self.decode_blocks / self.total_blocks) if self.total_blocks else 0.0

    @property
    def free_blocks(self) -> int | None:
        """None = unknown."""
        return max(0, self.total_blocks - self.decode_blocks) if self.total_blocks else None
