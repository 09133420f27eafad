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

    @property
    def is_decode(self) -> bool:
        """Whether this is the newest output token of a request past its prefill."""
        num_computed = self.request.num_computed_tokens
        past_prompt = num_computed >= self.request.num_prompt_tokens
        return past_prompt and num_computed + 1 == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step; decodes first, then prefill chunks."""

    items: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_decode_tokens(self) -> int:
        """Of them, the newest tokens of requests past their prefill; read before the step runs."""
        return sum(1 for item in self.items if item.is_decode)

    @property
    def num_prefill_tokens(self) -> int:
        """All others; read before the step runs."""
        return self.num_tokens - self.num_decode_tokens
