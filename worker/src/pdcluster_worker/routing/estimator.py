"""Interface of waiting-time estimators; they see counts and times only, so any engine will do."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class QueuedRequest:
    group: str
    prompt_tokens: int  # to prefill, without those in the prefix cache
    max_tokens: int
    priority: int = 0
    due_seconds: float = float("inf")  # deadline by the caller's clock
    num_tokens: int = 0  # output tokens so far

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > 0


@dataclass(frozen=True, slots=True)
class QueueState:
    requests: Collection[QueuedRequest]
    slots: int  # most requests that the engine runs at a time


@dataclass(frozen=True, slots=True)
class Completion:
    group: str
    prompt_tokens: int  # prefilled, without those in the prefix cache
    output_tokens: int
    prefill_seconds: float | None  # without waiting; None = unknown
    decode_seconds: float  # first token to last
    batch: float = 1.0  # mean number of requests that decoded together


class Estimator(Protocol):
    """Estimates are seconds from now; None = no figures yet, and nothing is refused for it."""

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """The request is not in the queue yet."""
        ...

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """Until its last token."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn from a request that ended by itself."""
        ...
