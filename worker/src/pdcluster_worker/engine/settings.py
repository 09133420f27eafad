"""The engine's own sizes: what the pure core needs to know, and nothing of files or devices."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one engine.

    num_blocks:            KV blocks in all.
    max_batched_tokens:    token budget of one step [V2].
    max_sequences:         most requests running at once [V2].
    max_model_len:         most tokens of one request, prompt and output together.
    fence_timeout_seconds: a fence older than this counts as overdue.
    admission_watermark:   share of the blocks left free by an admission beside others [V7].
    window:                tokens that one attends to in every layer, itself included; None: all.
                           The cache then has one block more than `num_blocks`, the null block.
    """

    block_size: int
    num_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool = True
    fence_timeout_seconds: float = 30.0
    admission_watermark: float = 0.0
    window: int | None = None

    @property
    def null_block(self) -> int:
        """Stands in a table for blocks that have left the window; in no pool, never read."""
        return self.num_blocks
