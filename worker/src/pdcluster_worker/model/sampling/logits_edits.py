"""In-place edits of single logits of a batch, undone after sampling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.messages.requests import SamplingParams


@dataclass(frozen=True, slots=True)
class Penalties:
    """Distinct tokens of one row, and how often each is in the output, [N] each."""

    row: int
    ids: NDArray[np.int64]
    occurrences: NDArray[np.float32]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    vocab_size: int
    penalties: list[Penalties]  # at most one per row
    biases: list[tuple[int, int, float]]  # (row, token, value to add)
    bans: list[tuple[int, int]]  # (row, token)

    @classmethod
    def nothing(cls, vocab_size: int) -> "LogitsEdits":
        return cls(vocab_size, [], [], [])

    @contextmanager
    def applied(self, logits: Tensor) -> Iterator[NDArray[np.int64]]:
        """Edit `logits` while the context is open; yields the rows whose bans hide a NaN or +inf.

        logits: [R, V] float32, contiguous.  Repetition penalty as in CTRL, over prompt and output;
        frequency and presence as in OpenAI's API, over the output.
        """
        steps = [*self._penalty_step(), *self._bias_step(), *self._ban_step()]
        if not steps:
            yield np.empty(0, dtype=np.int64)
            return
        flat = logits.view(-1)
        places = [torch.from_numpy(place).to(logits.device) for place, _ in steps]
        before = [flat[place] for place in places]
        try:
            for place, (_, change) in zip(places, steps, strict=True):
                flat[place] = change(flat[place])
            yield self._hidden(steps[-1][0], before[-1])
        finally:
            for place, value in zip(places, before, strict=True):
                flat[place] = value

    def _hidden(self, places: NDArray[np.int64], before: Tensor) -> NDArray[np.int64]:
        """Rows that were not finite before the bans."""
        if not self.bans:
            return np.empty(0, dtype=np.int64)
        is_bad = (before.isnan() | before.isposinf()).cpu().numpy()
        return np.unique(places[is_bad] // self.vocab_size)

    def _penalty_step(self) -> "Iterator[Step]":
        if not self.penalties:
            return
        sizes = [len(penalties.ids) for penalties in self.penalties]
        places = np.concatenate([one.row * self.vocab_size + one.ids for one in self.penalties])
        occurrences = torch.from_numpy(np.concatenate([one.occurrences for one in self.penalties]))
        samplings = [one.sampling for one in self.penalties]

        def of_each_token(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes))

        factor = of_each_token([sampling.repetition_penalty for sampling in samplings])
        subtracted = (
            of_each_token([sampling.frequency_penalty for sampling in samplings]) * occurrences
        )
        subtracted += of_each_token([sampling.presence_penalty for sampling in samplings]) * (
            occurrences > 0
        )

        def change(values: Tensor) -> Tensor:
            divisor = factor.to(values.device)
            repeated = torch.where(values > 0, values / divisor, values * divisor)
            return repeated - subtracted.to(values.device)

        yield places, change

    def _bias_step(self) -> "Iterator[Step]":
        if self.biases:
            added = torch.tensor([value for _, _, value in self.biases], dtype=torch.float32)
            pairs = [(row, token_id) for row, token_id, _ in self.biases]
            yield self._places(pairs), lambda values: values + added.to(values.device)

    def _ban_step(self) -> "Iterator[Step]":
        if self.bans:
            yield self._places(self.bans), lambda values: values.fill_(float("-inf"))

    def _places(self, pairs: list[tuple[int, int]]) -> NDArray[np.int64]:
        return np.array([row * self.vocab_size + token_id for row, token_id in pairs])


# positions in the flattened logits, and the function from old to new values
Step = tuple[NDArray[np.int64], Callable[[Tensor], Tensor]]
