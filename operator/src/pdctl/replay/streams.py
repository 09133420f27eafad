"""Requests that decode on one worker, as amounts at each of a few stages of their answers.

Answer lengths are Erlang distributed (`STAGES` stages around an equal share of the mean), so that
streams end all the time and not together, as in real traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

STAGES = 4
_LAST = 0.5  # of a stream: less is none


@dataclass
class Streams:
    """numbers: requests by stage; input_tokens, output_tokens: means of a request."""

    input_tokens: float = 0.0
    output_tokens: float = 0.0
    numbers: list[float] = field(default_factory=lambda: [0.0] * STAGES)

    @property
    def number(self) -> float:
        return sum(self.numbers)

    @property
    def is_done(self) -> bool:
        return self.number < _LAST

    @property
    def held_tokens(self) -> float:
        """Tokens in the KV cache."""
        answered = sum(number * (stage + 0.5) for stage, number in enumerate(self.numbers)) / STAGES
        return self.number * self.input_tokens + answered * self.output_tokens

    def add(self, number: float, input_tokens: float, output_tokens: float) -> None:
        total = self.number + number
        self.input_tokens += (input_tokens - self.input_tokens) * number / total
        self.output_tokens += (output_tokens - self.output_tokens) * number / total
        self.numbers[0] += number

    def decode(self, tokens: float) -> float:
        """Decode up to `tokens` for each stream; returns the sum."""
        if self.number <= 0.0:
            return 0.0
        stage_tokens = self.output_tokens / STAGES
        passes = _poisson(tokens / stage_tokens)
        after = [0.0] * STAGES
        passed = 0.0
        for stage, number in enumerate(self.numbers):
            left = STAGES - stage
            for steps in range(left):
                after[stage + steps] += number * passes[steps]
                passed += number * passes[steps] * steps
            passed += number * (1.0 - sum(passes[:left])) * left
        self.numbers = after
        return passed * stage_tokens


def _poisson(mean: float) -> Sequence[float]:
    """Probabilities of 0 to `STAGES` - 1 events.

    >>> [round(each, 3) for each in _poisson(1.0)]
    [0.368, 0.368, 0.184, 0.061]
    """
    found = [math.exp(-mean)]
    for number in range(1, STAGES):
        found.append(found[-1] * mean / number)
    return found
