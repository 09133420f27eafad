"""The requests that decode on one worker, as an amount at each of a few stages of their answers.

Answers have a mean length, not one length: a stream passes `STAGES` stages, each
of which lasts a random number of tokens around an equal share of the mean (an
Erlang distribution).  Streams of all lengths end all the time, as in real
traffic, and no two worker's streams end together because they began together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

STAGES = 4
_LAST = 0.5  # of a stream: less is none


@dataclass
class Streams:
    """Streams of one worker.

    input_tokens, output_tokens: means of a request; numbers: requests by stage
    """

    input_tokens: float = 0.0
    output_tokens: float = 0.0
    numbers: list[float] = field(default_factory=lambda: [0.0] * STAGES)

    @property
    def number(self) -> float:
        """Requests in all."""
        return sum(self.numbers)

    @property
    def is_done(self) -> bool:
        """Return whether less than half a request is left."""
        return self.number < _LAST

    @property
    def held_tokens(self) -> float:
        """Tokens in the KV cache: prompts, and the answers so far."""
        answered = sum(number * (stage + 0.5) for stage, number in enumerate(self.numbers)) / STAGES
        return self.number * self.input_tokens + answered * self.output_tokens

    def add(self, number: float, input_tokens: float, output_tokens: float) -> None:
        """More requests, at the beginning of their answers."""
        total = self.number + number
        self.input_tokens += (input_tokens - self.input_tokens) * number / total
        self.output_tokens += (output_tokens - self.output_tokens) * number / total
        self.numbers[0] += number

    def decode(self, tokens: float) -> float:
        """Let each stream write so many tokens, if it has as many left.

        Returns what all of them wrote.
        """
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
