"""One step's work, as the scheduler hands it to the runner."""

from dataclasses import dataclass

import msgspec

from pdcluster_worker.engine.request import Request


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of one request, from `request.num_computed_tokens` on, whose blocks are allocated."""

    request: Request
    num_tokens: int

    @property
    def start(self) -> int:
        """Position of the first scheduled token."""
        return self.request.num_computed_tokens

    @property
    def end(self) -> int:
        """One past the position of the last scheduled token."""
        return self.request.num_computed_tokens + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after this step: all known tokens are then computed."""
        request = self.request
        return request.num_computed_tokens + self.num_tokens == len(request.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step; decodes first, then prefill chunks."""

    items: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(item.num_tokens for item in self.items)
