"""Arithmetic of sliding windows: which blocks the next tokens can still see, and how many are held.

A token at position p attends to the `window` positions up to and with its own,
in every layer.  So a block of which every position lies before the next token's
window is never read again.  A model in which any layer attends to everything
has no window here.  Positions and counts are tokens of one request.
"""

from pdcluster_worker.messages.engine_settings import EngineSettings


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division, rounded up."""
    return -(-numerator // denominator)


def first_live_block(num_computed_tokens: int, settings: EngineSettings) -> int:
    """Index of the first block that a token at position `num_computed_tokens`, or later, can see.

    >>> settings = EngineSettings(4, 100, max_batched_tokens=8, max_sequences=1, max_model_len=99,
    ...     window=6)
    >>> [first_live_block(position, settings) for position in (0, 8, 9, 12, 13)]
    [0, 0, 1, 1, 2]
    """
    if settings.window is None:
        return 0
    return max(0, num_computed_tokens - settings.window + 1) // settings.block_size


def blocks_before(settings: EngineSettings) -> int | None:
    """Blocks before a block's first token that hold all of its window; None: every one."""
    return None if settings.window is None else ceil_div(settings.window - 1, settings.block_size)


def most_blocks(num_tokens: int, settings: EngineSettings) -> int:
    """Most blocks that a request holds at once: of its largest chunk, and the window before it.

    >>> settings = EngineSettings(4, 100, max_batched_tokens=8, max_sequences=1, max_model_len=99,
    ...     window=6)
    >>> [most_blocks(num_tokens, settings) for num_tokens in (8, 16, 1000)]
    [2, 4, 4]
    """
    num_blocks = ceil_div(num_tokens, settings.block_size)
    if settings.window is None:
        return num_blocks
    num_seen = settings.window - 1 + settings.max_batched_tokens
    return min(num_blocks, (num_seen + settings.block_size - 2) // settings.block_size + 1)


def most_tokens(settings: EngineSettings) -> int | None:
    """Most tokens of one request that the KV blocks can hold; None: any number of them.

    Without a window one block is spared: KV that a peer hands over needs room for one token more.
    With one none is: that token is within the length that the blocks hold.

    >>> from dataclasses import replace
    >>> settings = EngineSettings(4, 4, max_batched_tokens=8, max_sequences=1, max_model_len=99,
    ...     window=6)
    >>> most_tokens(settings), most_tokens(replace(settings,
    ...     num_blocks=3)), most_tokens(replace(settings, window=None))
    (None, 12, 12)
    """
    if settings.window is None:
        return (settings.num_blocks - 1) * settings.block_size
    if most_blocks(settings.max_model_len, settings) <= settings.num_blocks:
        return None
    return settings.num_blocks * settings.block_size
