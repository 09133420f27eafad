"""Answers of transformers for the tiny model, for docs/architecture.md's first promise: float32,
each prompt computed once.

Greedy answers are compared with generate()'s.  Of two sampled answers that
differ it shows whether the draw was a near tie there, so that noise of the
size of float32 rounding decides it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.model.sampling.sampler import Sampler
from tests.equality import assert_same_tokens

DRAW_NOISE = 1e-4
"""Logits of one token on two paths differ by about 1e-5 (other batch, other chunks)."""
NUM_DRAWS = 64


class Reference:
    """transformers on a model folder.  num_excused: answers that left the reference's at a near
    tie.
    """

    def __init__(self, folder: Path) -> None:
        self.num_excused = 0
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._answers: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """That many tokens after the prompt, end-of-sequence tokens taken as any other."""
        return self._answer(prompt, num_tokens)[0][:num_tokens]

    def prompt_logprobs(self, prompt: list[int]) -> torch.Tensor:
        """[N - 1, vocab_size]: of every token after each of the prompt's but the last."""
        with torch.no_grad():
            return torch.log_softmax(self._model(torch.tensor([prompt])).logits[0, :-1], dim=-1)

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Fail unless a greedy answer is the reference's, or first leaves it at a near tie."""
        assert tokens, "an empty answer"
        expected, gaps = self._answer(prompt, len(tokens))
        self.num_excused += assert_same_tokens(gaps[: len(tokens)], expected[: len(tokens)], tokens)

    def check_whole(self, prompt: list[int], tokens: list[int]) -> None:
        """The same as `check` by one forward pass over prompt and answer: for many answers, or long
        ones.
        """
        with torch.no_grad(), _one_thread():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        self.num_excused += assert_same_tokens(gaps, best.indices[:, 0].tolist(), tokens)

    def check_sampled(
        self, prompt: list[int], expected: list[int], actual: list[int], sampling: SamplingParams
    ) -> None:
        """Fail unless two seeded answers are equal, or first differ where the draw is
        a near tie.
        """
        assert len(actual) == len(expected), f"{len(actual)} tokens, expected {len(expected)}"
        place = next(
            (
                index
                for index, pair in enumerate(zip(expected, actual, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if place is None:
            return
        self.num_excused += 1
        possible = self._draws(prompt, expected[:place], sampling)
        assert {expected[place], actual[place]} <= possible, (
            f"token {place} is {actual[place]}, expected {expected[place]}, and no near tie"
        )

    def _draws(self, prompt: list[int], output: list[int], sampling: SamplingParams) -> set[int]:
        """The tokens that the draw after `output` can give when the logits are off by at most
        DRAW_NOISE.
        """
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[:, -1]
        request = EngineRequest.from_spec(
            RequestSpec("reference", prompt, sampling, output), now=0.0
        )
        noise = torch.Generator().manual_seed(0)
        rows = [
            logits + DRAW_NOISE * (2 * torch.rand(logits.shape, generator=noise) - 1)
            for _ in range(NUM_DRAWS)
        ]
        return {Sampler(logits.shape[1]).sample(row, [request])[0].token_id for row in rows}

    def _answer(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        known = self._answers.get(tuple(prompt))
        if known is None or len(known[0]) < num_tokens:
            known = self._answers[tuple(prompt)] = self._generate(prompt, num_tokens)
        return known

    def _generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        ids = torch.tensor([prompt])
        with _one_thread():
            result = self._generate_once(ids, num_tokens)
        best = torch.cat(result.logits).topk(2).values
        return result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()

    def _generate_once(self, ids: torch.Tensor, num_tokens: int) -> Any:
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Beside busy workers, torch's threads would mostly wait for one another; a tiny model needs
    but one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
