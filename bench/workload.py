"""The loads of the bench: how long prompts and answers are, and when requests arrive.

Everything follows from the seed, so each system of a round gets the same
prompts at the same times, and no two rounds or workloads share a prompt (a
prefix cache has nothing to answer from, but in `chat`, which is about it).
Knows no system and no clock.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdctl.bench.load import Arrivals, BenchRequest, poisson_arrivals

# special tokens and single bytes stand below it in the vocabularies that we measure
_FIRST_PLAIN_TOKEN = 256
_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 4
LONG_PROMPT_TOKENS = 1536
"""Length of every fourth prompt of a mix."""
CHAT_TURNS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """One load.

    name:        of itself; what stands before a dash names a group, which `--workload` chooses too
    concurrency: so many at a time; None for an open loop.
    rate:        open loop with Poisson arrivals, so many a second; None for a closed loop.
    shape:       same: prompts of one length; mix: every fourth prompt is long;
                 chat: conversations that share their first `num_prompt_tokens`, and grow
    by:          whose load generator sends it
    for_batches: `generate()` takes it too; it has no HTTP, and the time for some rates is better
                 spent elsewhere
    """

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    shape: Literal["same", "mix", "chat"] = "same"
    by: Literal["ours", "vllm"] = "ours"
    for_batches: bool = True

    @property
    def group(self) -> str:
        """The workloads that differ in their rate only are one group."""
        return self.name.partition("-")[0]

    def describe(self) -> str:
        """One line for a report."""
        arrival = (
            f"Poisson, {self.rate:g} per s"
            if self.rate
            else f"closed loop, {self.concurrency} at a time"
        )
        prompts = {
            "same": f"{self.num_prompt_tokens} in",
            "mix": f"{self.num_prompt_tokens} in, every fourth {LONG_PROMPT_TOKENS}",
            "chat": f"{CHAT_TURNS} turns after {self.num_prompt_tokens} shared tokens",
        }[self.shape]
        client = ", sent by `vllm bench serve`" if self.by == "vllm" else ""
        return (
            f"{prompts} / {self.num_output_tokens} out, {self.num_requests} requests a round, "
            f"{arrival}, temperature {self.temperature:g}{client}"
        )

    def warm_up(self) -> "Workload":
        """A short closed loop of the same prompt length."""
        return replace(
            self,
            num_requests=_WARM_UP_REQUESTS,
            num_output_tokens=min(_WARM_UP_TOKENS, self.num_output_tokens),
            concurrency=_WARM_UP_REQUESTS,
            rate=None,
            shape="same",
        )

    def needs_ping(self, seed: str, vocab_size: int) -> list[BenchRequest]:
        """The requests, of uniformly random token ids."""
        source = random.Random(f"prompts {self.name} {seed}")

        def tokens(count: int) -> list[int]:
            return [source.randrange(_FIRST_PLAIN_TOKEN, vocab_size) for _ in range(count)]

        if self.shape == "chat":
            prompts = self._conversations(tokens(self.num_prompt_tokens), tokens)
        else:
            prompts = [tokens(self._length(index)) for index in range(self.num_requests)]
        return [
            BenchRequest(prompt, self.num_output_tokens, self.temperature) for prompt in prompts
        ]

    def pace(self, seed: str) -> Arrivals:
        """Arrivals of its requests."""
        if self.rate is None:
            return Arrivals(max_concurrency=self.concurrency)
        return Arrivals(poisson_arrivals(self.rate, self.num_requests, f"{self.name} {seed}"))

    def _length(self, index: int) -> int:
        return (
            LONG_PROMPT_TOKENS if self.shape == "mix" and index % 4 == 3 else self.num_prompt_tokens
        )

    def _conversations(
        self, shared: list[int], tokens: Callable[[int], list[int]]
    ) -> list[list[int]]:
        """Turn after turn of all conversations; a turn adds a question and, as its answer, so many
        random tokens.

        What a system really answers is not sent back to it: prompts would differ between systems
        then.
        """
        conversations = [shared for _ in range(self.num_requests // CHAT_TURNS)]
        prompts = []
        for _ in range(CHAT_TURNS):
            conversations = [said + tokens(self.num_output_tokens) for said in conversations]
            prompts += conversations
            conversations = [said + tokens(self.num_output_tokens) for said in conversations]
        return prompts


# Sizes: three rounds show the noise; all of it on four systems takes less than 25 minutes on 2
# cores.
FULL: Sequence[Workload] = (
    Workload("A", 256, 64, 48, concurrency=16),
    Workload("sampled", 256, 64, 24, concurrency=16, temperature=1.0),
    Workload("B-0.5", 1024, 32, 8, rate=0.5, for_batches=False),
    Workload("B-1.0", 1024, 32, 16, rate=1.0),
    Workload("B-1.5", 1024, 32, 20, rate=1.5, for_batches=False),
    Workload("single", 128, 128, 2, concurrency=1),
    Workload("offline", 64, 32, 128, concurrency=128),
    Workload("mix", 64, 32, 16, rate=1.5, shape="mix", for_batches=False),
    Workload("chat", 512, 32, 24, concurrency=8, shape="chat"),
    Workload("client", 256, 64, 24, concurrency=16, by="vllm", for_batches=False),
)
QUICK: Sequence[Workload] = (
    Workload("A", 32, 8, 6, concurrency=3),
    Workload("sampled", 32, 8, 3, concurrency=3, temperature=1.0),
    Workload("B-2.0", 300, 4, 3, rate=2.0),
    Workload("single", 32, 8, 1, concurrency=1),
    Workload("offline", 16, 4, 8, concurrency=8),
    Workload("mix", 16, 4, 4, rate=2.0, shape="mix"),
    Workload("chat", 64, 8, 6, concurrency=2, shape="chat"),
    Workload("client", 32, 8, 6, concurrency=3, by="vllm", for_batches=False),
)
GROUPS = tuple(dict.fromkeys(workload.group for workload in FULL))
