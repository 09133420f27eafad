"""The seam between estimates of waiting times and what decides by them (admission, degradation,
order).

An estimator learns from completions and answers two questions about a request
that might join now.  It sees counts, tokens and seconds of this worker only,
so it serves any engine behind the wall.  Estimators: `waiting_time`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request on this worker, from its arrival to its last token.

    group:         its request group, see `waiting_time.groups`.
    prompt_tokens: to prefill; those of the prefix cache are not counted.
    num_tokens:    output tokens so far; 0 = it waits, or is prefilled.
    due_seconds:   of the caller's clock: when it is to be complete; inf = whenever.
    """

    group: str
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    due_seconds: float = float("inf")
    num_tokens: int = 0

    @property
    def is_decoding(self) -> bool:
        """True past its first token."""
        return self.num_tokens > 0


@dataclass(frozen=True, slots=True)
class QueueState:
    """The line that a request finds which comes now.  seats: requests that the engine runs at a
    time at most.
    """

    requests: Collection[QueuedRequest]
    slots: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The measurements of one request.

    prompt_tokens:   prefilled, without those of the prefix cache.
    prefill_seconds: that its prefill took, without waiting for it; None = not known.
    decode_seconds:  from its first token to its last.
    batch:           requests that decoded beside it and itself, on the average of that time.
    """

    group: str
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: float | None
    decode_seconds: float
    batch: float = 1.0


class Estimator(Protocol):
    """Estimates in seconds from now.

    None = there are no figures to go by yet, and nothing is to be refused for it.
    """

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """Until the first token of a request that joins the line now; it is not in the line yet."""
        ...

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """Until its last token."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn from a request that has ended by itself."""
        ...
