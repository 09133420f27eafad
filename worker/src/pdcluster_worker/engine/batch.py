"""One step's work, as the scheduler hands it to the runner."""

from dataclasses import dataclass

import msgspec

from pdcluster_worker.engine.request import Request


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of one request, whose blocks are allocated.

    start:   position of the first of them.
    samples: whether a token is sampled after this step: all known tokens are then computed.
    """

    request: Request
    num_tokens: int
    start: int
    samples: bool

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> "Scheduled":
        """The next tokens of a request, after those of the steps under way."""
        start = request.num_scheduled_tokens
        return cls(request, num_tokens, start, start + num_tokens == request.num_planned_tokens)

    @property
    def end(self) -> int:
        """One past the position of the last scheduled token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step; decodes first, then prefill chunks."""

    items: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(item.num_tokens for item in self.items)
