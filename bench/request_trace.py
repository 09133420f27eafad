"""A trace of single requests in the shape of Mooncake's files: arrival, lengths, and the blocks of
tokens that prompts share.  Pure.

Requests are turns of conversations: a turn's prompt is the conversation so far and a question, and
all conversations begin with one system prompt.  Lengths are lognormal, arrivals come in bursts as
in Azure's traces (gamma distributed gaps).  Everything follows from the seed.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from pdctl.bench.load import BenchRequest


@dataclass(frozen=True, slots=True)
class Row:
    """One request, by the names of Mooncake's files.

    timestamp:     milliseconds from the start
    input_length, output_length: tokens
    hash_ids:      of the prompt's blocks; equal ids are equal tokens after an equal beginning
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Length:
    """A lognormal length in tokens.  sigma: of its logarithm"""

    median: float
    sigma: float
    most: int

    def draw(self, source: random.Random) -> int:
        """One token at least."""
        return max(
            1, min(self.most, round(source.lognormvariate(math.log(self.median), self.sigma)))
        )


@dataclass(frozen=True, slots=True)
class SimulationTrace:
    """Sizes.  Mooncake's blocks have 512 tokens, and its prompts a median of some thousands.

    seconds:         from the first arrival to the last
    again_ratio:     share of requests that are a further turn of a conversation
    burstiness:      standard deviation of the gaps between arrivals over their mean; 1 = Poisson
    max_input_tokens: a conversation that would grow beyond is not continued
    """

    num_requests: int = 600
    seconds: float = 120.0
    block_tokens: int = 16
    system_blocks: int = 4
    question: Length = Length(48, 0.8, 512)
    output: Length = Length(24, 0.8, 128)
    again_ratio: float = 0.5
    burstiness: float = 2.0
    max_input_tokens: int = 768

    def rows(self, seed: str) -> list[Row]:
        """The requests by arrival."""
        source = random.Random(f"request trace {seed}")
        writer = _Writer(self, source)
        return [writer.row(round(1000 * second)) for second in self._arrivals(source)]

    def _arrivals(self, source: random.Random) -> list[float]:
        shape = self.burstiness**-2
        gaps = [source.gammavariate(shape, 1 / shape) for _ in range(self.num_requests - 1)]
        times = list(accumulate(gaps, initial=0.0))
        scale = self.seconds / times[-1] if times[-1] else 0.0
        return [time * scale for time in times]

    def in_words(self) -> str:
        """Its sizes, for a report."""
        return (
            f"{self.num_requests} requests in {self.seconds:g} s, gaps with a coefficient of "
            f"variation of {self.burstiness:g}; "
            f"{self.system_blocks * self.block_tokens} tokens of system prompt, questions of "
            f"{self.question.median:g} (median), "
            f"{self.again_ratio:.0%} of them further turns, {self.output.median:g} out (median)"
        )


@dataclass(slots=True)
class _Conversation:
    """Whole blocks so far."""

    hash_ids: list[int]


class _Writer:
    """Makes rows in order."""

    def __init__(self, trace: SimulationTrace, source: random.Random) -> None:
        self._trace = trace
        self._source = source
        self._open: list[_Conversation] = []
        self._next_id = trace.system_blocks

    def row(self, timestamp: int) -> Row:
        trace, source = self._trace, self._source
        question, output = trace.question.draw(source), trace.output.draw(source)
        conversation = self._conversation(question)
        begun = len(conversation.hash_ids)
        length = begun * trace.block_tokens + question
        hash_ids = (
            *conversation.hash_ids,
            *self._new_ids(math.ceil(question / trace.block_tokens)),
        )
        # What the next turn begins with: this prompt and its answer, as far as they fill blocks.
        num_whole = length // trace.block_tokens
        answer = self._new_ids((length + output) // trace.block_tokens - num_whole)
        conversation.hash_ids = [*hash_ids[:num_whole], *answer]
        return Row(timestamp, length, output, hash_ids)

    def _conversation(self, question: int) -> _Conversation:
        limit = self._trace.max_input_tokens - question
        fitting = [
            each for each in self._open if len(each.hash_ids) * self._trace.block_tokens <= limit
        ]
        if fitting and self._source.random() < self._trace.again_ratio:
            return self._source.choice(fitting)
        self._open.append(_Conversation(list(range(self._trace.system_blocks))))
        return self._open[-1]

    def _new_ids(self, count: int) -> range:
        self._next_id += count
        return range(self._next_id - count, self._next_id)


def asks_of(rows: Iterable[Row], block_tokens: int, tokens: range, seed: str) -> list[BenchRequest]:
    """Requests with random token ids of that range: a block's follow from its id."""
    return [
        BenchRequest(_prompt(row, block_tokens, tokens, seed), row.output_length) for row in rows
    ]


def _prompt(row: Row, block_tokens: int, tokens: range, seed: str) -> list[int]:
    prompt: list[int] = []
    for hash_id in row.hash_ids:
        source = random.Random(f"block {seed} {hash_id}")
        prompt += [source.choice(tokens) for _ in range(block_tokens)]
    return prompt[: row.input_length]
