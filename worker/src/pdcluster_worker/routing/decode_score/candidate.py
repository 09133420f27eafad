"""Inputs of a policy's choice: the request, and each worker that may run it.

Counts are those of the worker's last report and of what was sent there since
(`routing.active_load`).  Shares are 0 to 1; a share that a worker does not
know is 0.
"""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The request.  prompt_tokens: all that must have KV before the first new token."""

    prompt_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """KV blocks of the prompt, the last one part-filled."""
        return max(1, -(-self.prompt_tokens // self.block_size))


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A decode worker.  A struct, because each request makes one of every worker.

    key:            its pod.
    is_self:        it is the one that chooses: no hop.
    num_requests:   on it, waiting or running.
    matched_blocks: leading blocks of the prompt in its prefix cache.
    is_recent:      the first block of the prompt was sent there recently.
    prefill_tokens: that wait there to be computed.
    decode_blocks:  KV blocks that requests hold there.
    total_blocks:   KV blocks in all; 0 = not known.
    busy_ratio:     share of time in which it computes: its GPU's, else its engine's.
    memory_bandwidth_ratio: share of time in which its GPU moves memory; 0 where that is not
                            measured.
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
        """Share of its KV blocks that requests hold."""
        return min(1.0, self.decode_blocks / self.total_blocks) if self.total_blocks else 0.0

    @property
    def free_blocks(self) -> int | None:
        """KV blocks that no request holds; None where that is not known."""
        return max(0, self.total_blocks - self.decode_blocks) if self.total_blocks else None
