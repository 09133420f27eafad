"""The greedy answers of the sample model, each prompt alone, by transformers in float32.

An answer is checked in one forward pass over prompt and answer: at every place the
reference's best token, given what stands before it, must be the one that came.
So an answer that passes is the greedy one, token for token.  A token that is not
the best is excused where the reference has it within NEAR_TIE of the best, and counted.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from e2e.client_program import prompt
from e2e.harness import Json
from pdcluster_worker.server.text.chat_template import TemplateInput
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.equality import NEAR_TIE


class Greedy:
    """The reference."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._tokenizer = Tokenizer.load(folder)
        self._id_of = {
            self._tokenizer.token_bytes(id_): id_
            for id_ in reversed(range(self._model.config.vocab_size))
        }

    def check(self, answers: list[Json], words: int) -> int:
        """Fail unless every answer is the greedy one of its prompt; returns how many tokens were
        excused.
        """
        return sum(
            self._check(
                prompt(answer["index"], words),
                [self._id_of[bytes(token)] for token in answer["tokens"]],
            )
            for answer in answers
        )

    def _check(self, text: str, tokens: list[int]) -> int:
        before = self._tokenizer.encode_chat(
            TemplateInput([{"role": "user", "content": text}])
        ).token_ids
        with torch.no_grad():
            logits = self._model(torch.tensor([[*before, *tokens[:-1]]])).logits[
                0, len(before) - 1 :
            ]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps = (logits.max(dim=1).values - chosen).tolist()
        wrong = [place for place, gap in enumerate(gaps) if gap >= NEAR_TIE]
        assert not wrong, (
            f"{text[:60]!r}: token {wrong[0]} of {len(tokens)} is {gaps[wrong[0]]:.4g} below the "
            "best, no near tie"
        )
        return sum(gap > 0 for gap in gaps)
