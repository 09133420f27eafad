"""One step's work, as the scheduler hands it to the runner."""

from dataclasses import dataclass

import msgspec

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import SamplingParams


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of one request, whose blocks are allocated.

    start:   position of the first of them.
    samples: whether a token is sampled after this step: all known tokens are then computed.
    drafts:  the last of the tokens, which are guesses: a token is sampled after the known ones and
             after each draft, and counts as far as the drafts before it are what was sampled.
    waits:   no other step takes this request before this one has ended.
    """

    request: EngineRequest
    num_tokens: int
    start: int
    samples: bool
    drafts: tuple[int, ...] = ()
    waits: bool = False

    @classmethod
    def of(cls, request: EngineRequest, num_tokens: int) -> "Scheduled":
        """The next tokens of a request, after those of the steps under way."""
        start = request.num_scheduled_tokens
        return cls(request, num_tokens, start, start + num_tokens == request.num_planned_tokens)

    @property
    def end(self) -> int:
        """One past the position of the last scheduled token."""
        return self.start + self.num_tokens

    @property
    def num_known_tokens(self) -> int:
        """Those of them that are no drafts."""
        return self.num_tokens - len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens; shorter by the last one where the step before samples it."""
        return [*self.request.tokens[self.start : self.start + self.num_known_tokens], *self.drafts]


@dataclass(frozen=True, slots=True)
class AfterDrafts:
    """A place to sample at: a request as it is once its first drafts are accepted."""

    request: EngineRequest
    drafts: tuple[int, ...]

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Prompt, output and the drafts."""
        return self.request.num_tokens + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        """Output and the drafts."""
        return self.request.num_output_tokens + len(self.drafts)


SamplePlace = EngineRequest | AfterDrafts
"""Tokens after which one is sampled."""


def sample_places(item: Scheduled) -> list[SamplePlace]:
    """Those of an item that samples, in the order of its rows."""
    later = [
        AfterDrafts(item.request, item.drafts[:count]) for count in range(1, len(item.drafts) + 1)
    ]
    return [item.request, *later]


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step; decodes first, then prefill chunks."""

    items: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(item.num_tokens for item in self.items)
