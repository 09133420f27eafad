"""Block managers: for how many tokens a request takes blocks when it is admitted.

`OnDemand` is that of vLLM and Sarathi: the known tokens, and one block more
whenever the last is full, at the risk of preemption.  `ReserveMax` is that of
Orca and FasterTransformer: the longest that the request can become, so that
nothing ever grows, at the price of blocks that stay empty.
"""

from typing import Protocol

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine_settings import EngineSettings


class BlockPolicy(Protocol):
    """Blocks that a request takes at its admission."""

    def num_tokens(self, request: EngineRequest) -> int:
        """Tokens that it takes blocks for, at least all that are known."""
        ...

    def num_growing_blocks(self, num_requests: int) -> int:
        """Blocks to keep free for the growth of so many requests that hold theirs."""
        ...


class OnDemand:
    """The tokens that are known."""

    def num_tokens(self, request: EngineRequest) -> int:
        """See `BlockPolicy`."""
        return len(request.tokens)

    def num_growing_blocks(self, num_requests: int) -> int:
        """See `BlockPolicy`: each may need one with its next token."""
        return num_requests


class ReserveMax:
    """The longest that the request can become, as far as the pool can hold it."""

    def __init__(self, settings: EngineSettings) -> None:
        capacity = settings.num_blocks * settings.block_size
        self._most_tokens = min(settings.max_model_len, capacity)

    def num_tokens(self, request: EngineRequest) -> int:
        """See `BlockPolicy`; a prefill for a peer makes no further token here."""
        known = len(request.tokens)
        if request.target is not None:
            return known
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        return max(known, min(longest, self._most_tokens))

    def num_growing_blocks(self, num_requests: int) -> int:
        """See `BlockPolicy`: nothing grows."""
        return 0
