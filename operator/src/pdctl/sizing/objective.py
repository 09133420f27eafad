"""The goal of a plan: lengths of requests, limits of latency, and the load that a fleet holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

_Value = TypeVar("_Value")
_BINS = 16  # of prompts, for each of which a step is looked up


@dataclass(frozen=True)
class Prompt:
    """Prompts of about one length.  cached: tokens that a KV cache has; share: of all requests."""

    tokens: float
    cached: float = 0.0
    share: float = 1.0

    @property
    def computed(self) -> float:
        return self.tokens - self.cached


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of a trace, in tokens, beside the means.

    prompts: all of them by what is computed, least first, with a KV cache of so many tokens
    stream:  prompt and answer of the streams that run at any time: a long answer runs longer
    longest: request, prompt and answer together
    short:   prompt; it and shorter ones have a twentieth of all tokens
    """

    prompts: Callable[[int], Sequence[Prompt]]
    stream: tuple[int, int]
    longest: int
    short: int


@dataclass(frozen=True)
class Objective:
    """input_tokens, output_tokens: of a request, means where lengths scatter;
    percentile: of both latencies, None = means; lengths: None = all are equal.
    """

    input_tokens: int
    output_tokens: int
    ttft_seconds: float
    itl_seconds: float
    percentile: float | None = None
    lengths: LengthDistribution | None = None

    @property
    def steps(self) -> int:
        """Decode steps of a request, whose first token comes from its prefill."""
        return max(1, self.output_tokens - 1)

    @property
    def stream(self) -> tuple[int, int]:
        """Prompt and answer of a running stream."""
        return self.lengths.stream if self.lengths else (self.input_tokens, self.output_tokens)

    @property
    def longest_tokens(self) -> int:
        both = self.input_tokens + self.output_tokens
        return self.lengths.longest if self.lengths else both

    def prompts(self, kv_tokens: int) -> Sequence[Prompt]:
        return self.lengths.prompts(kv_tokens) if self.lengths else [Prompt(self.input_tokens)]

    def long_prompt(self, kv_tokens: int) -> Prompt:
        return self.long_of(self.prompts(kv_tokens))

    def long_of(self, prompts: Sequence[Prompt]) -> Prompt:
        """The one that TTFT is of: at the percentile by what is computed, else the mean."""
        if self.percentile is None:
            return mean_prompt(prompts)
        return at_percentile([(each, each.share) for each in prompts], self.percentile)


def binned(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The means of bins of about equal share.  prompts: in order

    >>> [each.tokens for each in binned([Prompt(tokens, 0, 1 / 32) for tokens in range(32)])][:3]
    [0.5, 2.5, 4.5]
    """
    found: list[Prompt] = []
    held: list[Prompt] = []
    share = 0.0
    for each in prompts:
        held.append(each)
        share += each.share
        if share >= (1.0 - 1e-9) / _BINS:
            found.append(mean_prompt(held))
            held, share = [], 0.0
    return [*found, mean_prompt(held)] if held else found


def mean_prompt(prompts: Iterable[Prompt]) -> Prompt:
    tokens = cached = share = 0.0
    for each in prompts:
        tokens += each.share * each.tokens
        cached += each.share * each.cached
        share += each.share
    return Prompt(tokens / share, cached / share, share)


def at_percentile(ordered: Sequence[tuple[_Value, float]], percentile: float) -> _Value:
    """The first value that with those before it has the percentile of all weight.

    >>> at_percentile([("short", 3.0), ("long", 1.0)], 75.0)
    'short'
    """
    needed = percentile / 100.0 * sum(weight for _, weight in ordered) * (1.0 - 1e-9)
    for value, weight in ordered:
        needed -= weight
        if needed <= 0.0:
            return value
    return ordered[-1][0]


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Per second: requests, and how many of the mean prompt and of the mean answer they make."""

    seconds: float
    requests: float
    prompts: float
    answers: float


@dataclass(frozen=True)
class OfferedLoad:
    """A load that a fleet has to hold, in so many per cent of the time."""

    windows: Sequence[LoadWindow]
    percentile: float = 100.0

    def scaled(self, share: float) -> "OfferedLoad":
        windows = [
            LoadWindow(
                each.seconds,
                share * each.requests,
                share * each.prompts,
                share * each.answers,
            )
            for each in self.windows
        ]
        return OfferedLoad(windows, self.percentile)

    @cached_property
    def requests_per_second(self) -> float:
        return self.at(lambda window: window.requests)

    @cached_property
    def prompts(self) -> float:
        """Prompts of the mean length, a second."""
        return self.at(lambda window: window.prompts)

    @cached_property
    def answers(self) -> float:
        """Answers of the mean length, a second."""
        return self.at(lambda window: window.answers)

    def at(self, load: Callable[[LoadWindow], float]) -> float:
        """The least that is enough in the percentile of the time.

        >>> demand = OfferedLoad([LoadWindow(60.0, 4.0, 2.0, 8.0), LoadWindow(60.0, 1.0, 3.0, 0.5)])
        >>> demand.at(lambda window: window.prompts + window.answers)
        10.0
        """
        if self.percentile >= 100.0:
            return max(map(load, self.windows))
        loads = sorted((load(each), each.seconds) for each in self.windows)
        return at_percentile(loads, self.percentile)
