"""A prefix-heavy trace in the shape of Mooncake's: requests share a system prompt, then one of some
contexts, then nothing.  Pure.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from pdctl.bench.load import BenchRequest

VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class PrefixTrace:
    """Sizes in tokens.

    contexts are documents, tool lists or chats so far.
    skew: the n-th context is asked for in proportion to n ** -skew; 0 = each as often.
    """

    num_requests: int = 128
    num_contexts: int = 16
    system_tokens: int = 64
    context_tokens: int = 960
    question_tokens: tuple[int, int] = (16, 64)
    output_tokens: int = 8
    skew: float = 0.0

    def needs_ping(self, seed: str) -> list[BenchRequest]:
        """The requests in their order."""
        draw = random.Random(f"prefix trace {seed}")
        system = _tokens(draw, self.system_tokens)
        contexts = [_tokens(draw, self.context_tokens) for _ in range(self.num_contexts)]
        weights = list(accumulate((n + 1) ** -self.skew for n in range(self.num_contexts)))
        chosen = draw.choices(contexts, cum_weights=weights, k=self.num_requests)
        return [
            BenchRequest(
                [*system, *context, *_tokens(draw, draw.randint(*self.question_tokens))],
                self.output_tokens,
            )
            for context in chosen
        ]

    def in_words(self) -> str:
        """Its sizes, for a report."""
        low, high = self.question_tokens
        return (
            f"{self.num_requests} requests: {self.system_tokens} tokens of system prompt, one of "
            f"{self.num_contexts} contexts of "
            f"{self.context_tokens} (skew {self.skew:g}), {low} to {high} of their own, "
            f"{self.output_tokens} out"
        )


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, VOCABULARY) for _ in range(count)]
