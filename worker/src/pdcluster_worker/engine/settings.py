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
    """

    block_size: int
    num_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool = True
    fence_timeout_seconds: float = 30.0
