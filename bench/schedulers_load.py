"""The load of the schedulers' benches and what they count: chats, and long prompts among them.

Pure.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdctl.bench.load import percentile, poisson_arrivals

VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes in tokens; every `long_every`-th request is long."""

    chat: tuple[int, int] = (128, 48)
    long: tuple[int, int] = (1536, 16)
    long_every: int = 3

    def in_words(self, count: int) -> str:
        """In words."""
        (chat_in, chat_out), (long_in, long_out) = self.chat, self.long
        sizes = (
            f"{chat_in} in / {chat_out} out, every {self.long_every}. {long_in} in / {long_out} out"
        )
        return f"{count} requests of {sizes}, Poisson arrivals"


LOAD = Load()


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and when it comes, in seconds from the start."""

    seconds: float
    spec: RequestSpec


def timed_requests(load: Load, count: int, rate: float, seed: str) -> list[TimedRequest]:
    """In order of time; prompts are drawn, and none comes twice."""
    source = random.Random(f"prompts {seed}")
    found: list[TimedRequest] = []
    for number, seconds in enumerate(poisson_arrivals(rate, count, seed)):
        is_long = number % load.long_every == load.long_every - 1
        num_prompt, num_output = load.long if is_long else load.chat
        prompt = [source.randrange(VOCABULARY) for _ in range(num_prompt)]
        sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0.0, ignore_eos=True)
        found.append(TimedRequest(seconds, RequestSpec(f"{seed} {number}", prompt, sampling)))
    return found


@dataclass(slots=True)
class Answers:
    """Arrival of each request, and its tokens; seconds of one clock.

    delays: between arrival and the first step of each request
    """

    arrived: dict[str, float]
    times: dict[str, list[float]] = field(default_factory=dict)
    delays: dict[str, float] = field(default_factory=dict)
    num_ended: int = 0

    def take(self, tokens: Sequence[Token], now: float) -> None:
        """Tokens of one step."""
        for token in tokens:
            self.times.setdefault(token.request_id, []).append(now)
            if token.queue_seconds is not None:
                self.delays[token.request_id] = token.queue_seconds
            self.num_ended += token.finish_reason is not None

    def is_complete(self, count: int) -> bool:
        """Return whether so many have ended."""
        return self.num_ended >= count

    @property
    def gaps(self) -> list[float]:
        """Between two tokens of a request (TBT)."""
        return [b - a for times in self.times.values() for a, b in pairwise(times)]

    @property
    def first(self) -> list[float]:
        """Times to first token."""
        return [times[0] - self.arrived[name] for name, times in self.times.items()]

    @property
    def tokens_per_second(self) -> float:
        """From the first arrival to the last token."""
        last = max(times[-1] for times in self.times.values())
        return sum(map(len, self.times.values())) / (last - min(self.arrived.values()))

    def tbt(self, percent: float) -> float:
        """A percentile of the gaps."""
        return percentile(self.gaps, percent)

    def row(self) -> str:
        """Cells of a table."""
        gaps = [f"{1e3 * self.tbt(percent):.0f}" for percent in (50, 99, 100)]
        first = [f"{percentile(self.first, percent):.2f}" for percent in (50, 99)]
        return " | ".join([f"{self.tokens_per_second:.1f}", *gaps, *first])
