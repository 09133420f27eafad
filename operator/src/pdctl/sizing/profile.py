"""Steps of one engine on one type of GPU: what a search and a simulation know of a worker."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from pdctl.sizing.objective import Objective, binned, mean_prompt


@dataclass(frozen=True, order=True)
class RankLayout:
    """Ranks of one worker.  Experts lie over all of them, whole where is_expert_parallel, else in
    tensor parallel.
    """

    tensor: int = 1
    data: int = 1
    is_expert_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.data

    def __str__(self) -> str:
        """
        >>> print(RankLayout(4), RankLayout(2, 4), RankLayout(1, 8, True))
        TP4 TP2 DP4 DP8 EP8
        """
        names = [("TP", self.tensor), ("DP", self.data)]
        words = [f"{name}{size}" for name, size in names if size > 1]
        if self.is_expert_parallel:
            words.append(f"EP{self.gpus}")
        return " ".join(words) or "TP1"


@dataclass(frozen=True)
class PromptScatter:
    """Prompts that are not all equal, beside the mean one.

    cached_tokens:  of the mean prompt, which a prefix cache has
    uneven_seconds: that a prefill takes more in the mean than that of the mean prompt
    long_tokens:    that the prompt of TTFT has more to compute; long_seconds: that it takes more
    variation:      of the seconds of a prefill: their variance by their mean squared
    """

    cached_tokens: float = 0.0
    uneven_seconds: float = 0.0
    long_tokens: float = 0.0
    long_seconds: float = 0.0
    variation: float = 0.0


def prompt_scatter(
    goal: Objective, kv_tokens: int, seconds: Callable[[int, int], float]
) -> PromptScatter:
    """seconds: of the prefill of one prompt, by its tokens and those of them that are cached."""

    def taken(tokens: float, cached: float) -> float:
        whole = max(1, round(tokens))
        return seconds(whole, min(round(cached), whole - 1))

    prompts = goal.prompts(kv_tokens)
    mean, long = mean_prompt(prompts), goal.long_of(prompts)
    times = [(taken(each.tokens, each.cached), each.share) for each in binned(prompts)]
    mean_seconds = sum(time * share for time, share in times)
    variance = sum((time - mean_seconds) ** 2 * share for time, share in times)
    return PromptScatter(
        cached_tokens=mean.cached,
        uneven_seconds=max(0.0, mean_seconds - taken(mean.tokens, mean.cached)),
        long_tokens=max(0.0, long.computed - mean.computed),
        long_seconds=max(0.0, taken(long.tokens, long.cached) - mean_seconds),
        variation=variance / mean_seconds**2,
    )


DECODE_BUDGET = 2048  # maxBatchedTokens of a decode worker


def prefill_budget(prompts: int, input_tokens: int) -> int:
    """maxBatchedTokens of a worker that prefills so many prompts at once."""
    return max(DECODE_BUDGET, math.ceil(prompts * input_tokens / 1024) * 1024)


@dataclass(frozen=True)
class EngineProfile:
    """Seconds of steps of one worker; sizes are of one data-parallel rank.

    prefill: by mean prompts at once; decode: by streams; mixed: by (maxBatchedTokens, streams), of
    a step whose chunk fills what the streams leave.  kv_tokens: what a rank's KV cache holds, by
    the most maxBatchedTokens whose activations leave it so much.
    warning: why the seconds are wrong, empty where nothing is known.
    """

    gpu: str
    layout: RankLayout
    prefill: Mapping[int, float]
    decode: Mapping[int, float]
    mixed: Mapping[tuple[int, int], float]
    kv_tokens: Mapping[float, int]
    source: str
    warning: str = ""
    scatter: PromptScatter = PromptScatter()

    def kv_of(self, max_batched_tokens: int) -> int:
        """0 = the activations of so many tokens do not fit."""
        fitting = (each for each in sorted(self.kv_tokens) if max_batched_tokens <= each)
        return self.kv_tokens.get(next(fitting, 0.0), 0)

    @property
    def least_kv_tokens(self) -> int:
        return min(self.kv_tokens.values())

    def decode_seconds(self, streams: float) -> float:
        """Between two numbers of streams on a line, and beyond the last on its continuation."""
        known = sorted(self.decode)
        if len(known) < 2 or streams <= known[0]:
            return self.decode[known[0]]
        pairs = list(pairwise(known))
        low, high = next((pair for pair in pairs if streams <= pair[1]), pairs[-1])
        slope = (self.decode[high] - self.decode[low]) / (high - low)
        return self.decode[low] + slope * (streams - low)
