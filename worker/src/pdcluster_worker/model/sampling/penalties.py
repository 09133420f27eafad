"""Logits edits of requests: penalties, then biases, then bans.

Counts are rebuilt from `request.tokens` when they do not fit, so dropping them is always safe.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.engine.ports import failed_row
from pdcluster_worker.engine.request import AfterDrafts, EngineRequest, SamplePlace
from pdcluster_worker.errors import RequestError
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


FIRST_CAPACITY = 256  # distinct tokens; doubled when full


@dataclass(slots=True)
class TokenCounts:
    """Distinct tokens of one request, in order of appearance."""

    first: int  # index from which tokens count: the prompt only for repetition
    num_counted: int = 0  # those before `first` included
    last: int = -1  # last counted token
    _ids: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(FIRST_CAPACITY, dtype=np.int64)
    )
    _occurrences: NDArray[np.float32] = field(
        default_factory=lambda: np.zeros(FIRST_CAPACITY, np.float32)
    )
    _place: dict[int, int] = field(default_factory=dict)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def occurrences(self) -> NDArray[np.float32]:
        """[N] counts in the output."""
        return self._occurrences[: len(self._place)]

    def is_prefix_of(self, request: EngineRequest) -> bool:
        """Return whether the counted tokens begin the request's, by length and last token."""
        if self.num_counted == 0:
            return True
        is_long_enough = self.num_counted <= request.num_tokens
        return is_long_enough and request.tokens[self.num_counted - 1] == self.last

    def extend(self, request: EngineRequest) -> None:
        start = max(self.num_counted, self.first)
        self._add(request.tokens[start:])
        for token_id in request.tokens[max(start, request.num_prompt_tokens) :]:
            self._occurrences[self._place[token_id]] += 1
        self.num_counted, self.last = request.num_tokens, request.tokens[-1]

    def after(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`ids` and `occurrences` as if the request had these tokens too."""
        more = Counter(drafts)
        new = [token_id for token_id in more if token_id not in self._place]
        ids = np.append(self.ids, np.array(new, np.int64))
        counted = np.array([more[token_id] for token_id in new], np.float32)
        occurrences = np.append(self.occurrences, counted)
        for token_id in more.keys() - new:
            occurrences[self._place[token_id]] += more[token_id]
        return ids, occurrences

    def _add(self, token_ids: list[int]) -> None:
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._place]
        before, after = len(self._place), len(self._place) + len(new)
        if after > len(self._ids):
            # Fresh memory: a step's edits may still look at the old one.
            self._ids = np.concatenate([self._ids, np.empty(after, dtype=np.int64)])
            self._occurrences = np.concatenate(
                [self._occurrences, np.zeros(after, dtype=np.float32)]
            )
        self._ids[before:after] = new
        self._place.update(zip(new, range(before, after), strict=True))


class PenaltyState:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[str, TokenCounts] = {}

    def counts(self, request: EngineRequest) -> TokenCounts:
        counts = self._counts.get(request.request_id)
        if counts is None or not counts.is_prefix_of(request):
            is_prompt_seen = request.sampling.repetition_penalty != 1.0
            counts = TokenCounts(0 if is_prompt_seen else request.num_prompt_tokens)
            self._counts[request.request_id] = counts
        counts.extend(request)
        return counts

    def forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    def edits(self, requests: Sequence[SamplePlace]) -> tuple[LogitsEdits, dict[int, RequestError]]:
        """Edits by row, and errors of rows with unknown token ids."""
        edits, errors = LogitsEdits(self._vocab_size, [], [], []), dict[int, RequestError]()
        for row, request in enumerate(requests):
            sampling, banned = request.sampling, banned_tokens(request)
            if not (banned or sampling.logit_bias or uses_penalties(sampling)):
                continue  # as most rows of every step
            error = self._unknown_token(request, banned)
            if error is not None:
                errors[row] = error
                continue
            if uses_penalties(sampling):
                edits.penalties.append(Penalties(row, *self._counted(request), sampling))
            edits.biases.extend((row, *pair) for pair in sampling.logit_bias.items())
            edits.bans.extend((row, token_id) for token_id in banned)
        return edits, errors

    def _counted(self, request: SamplePlace) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if isinstance(request, AfterDrafts):
            return self.counts(request.request).after(request.drafts)
        counts = self.counts(request)
        return counts.ids, counts.occurrences

    def _unknown_token(self, request: SamplePlace, banned: list[int]) -> RequestError | None:
        biased = list(request.sampling.logit_bias)
        for name, token_ids in (("logit_bias", biased), ("stop_token_ids", banned)):
            for token_id in token_ids:
                if not 0 <= token_id < self._vocab_size:
                    message = (
                        f"request {request.request_id}: {name} names token {token_id}, but token "
                        f"ids are 0 to {self._vocab_size - 1}"
                    )
                    return failed_row("unknown_token_ids", message)
        return None


def uses_penalties(sampling: SamplingParams) -> bool:
    return (
        bool(sampling.presence_penalty or sampling.frequency_penalty)
        or sampling.repetition_penalty != 1.0
    )


def banned_tokens(request: SamplePlace) -> list[int]:
    """Tokens that would end the request before min_tokens; with a constraint its mask bans them."""
    sampling = request.sampling
    if sampling.constraint is not None or request.num_output_tokens >= sampling.min_tokens:
        return []
    return [*sampling.eos_token_ids, *sampling.stop_token_ids]
