"""The masks of a step: which tokens each of its rows may have, filled while the model computes.

A mask depends on the request's own tokens alone.  Tokens that must not come yet
(the end of an answer before `min_tokens`, or at all under `ignore_eos`) are barred
here too, unless nothing else is left: a grammar that has ended cannot go on.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.engine.ports import failed_row
from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import RequestError
from pdcluster_worker.grammar.book import GrammarBook
from pdcluster_worker.grammar.follower import Follower, OutsideError

BITS = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """words: [M, ceil(vocab_size / 32)] int32.  places: [R] int64, of each row's mask, -1 without one.

    errors: of rows whose tokens do not fit their grammar.
    """

    words: NDArray[np.int32]
    places: NDArray[np.int64]
    errors: dict[int, RequestError]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to fill: its follower, the tokens to feed it, those to look along, and those to bar."""

    row: int
    request_id: str
    follower: Follower
    new: list[int]
    guessed: Sequence[int]
    barred: list[int]


class MaskMaker:
    """One per runner."""

    def __init__(self, book: GrammarBook, vocab_size: int) -> None:
        self._book = book
        self._num_words = -(-vocab_size // BITS)
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, rows: Sequence[tuple[Request, Sequence[int]]]) -> "Future[Masks] | None":
        """Begin to fill the masks of these rows; None where no row is constrained.

        A row is a request and the tokens that come after those that it has: one that the step
        before samples, or drafts.  The masks are for the token after these.
        """
        found = [
            self._row(row, request, guessed) for row, (request, guessed) in enumerate(rows) if request.sampling.constraint is not None
        ]
        if not found:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "masks")
        return self._pool.submit(self._fill, found, len(rows))

    def close(self) -> None:
        """Wait for the masks under way."""
        if self._pool is not None:
            self._pool.shutdown()

    def _row(self, row: int, request: Request, guessed: Sequence[int]) -> _Row:
        follower = self._book.follower(request)
        new = follower.new_tokens(request.tokens[request.num_prompt_tokens :])
        sampling, num_output = request.sampling, request.num_output_tokens + len(guessed)
        is_early = num_output < sampling.min_tokens
        barred = [*sampling.eos_token_ids] if is_early or sampling.ignore_eos else []
        return _Row(row, request.request_id, follower, new, list(guessed), [*barred, *sampling.stop_token_ids] if is_early else barred)

    def _fill(self, rows: list[_Row], num_rows: int) -> Masks:
        words = np.empty((len(rows), self._num_words), dtype=np.int32)
        places = np.full(num_rows, -1, dtype=np.int64)
        errors: dict[int, RequestError] = {}
        for place, row in enumerate(rows):
            try:
                row.follower.feed(row.new)
            except OutsideError as e:
                errors[row.row] = failed_row("outside_grammar", f"request {row.request_id}: {e}")
                continue
            if row.follower.fill(words[place], row.guessed):
                places[row.row] = place
                _bar(words[place], row.barred)
        return Masks(words, places, errors)


def _bar(words: NDArray[np.int32], token_ids: list[int]) -> None:
    """Bar these tokens too, unless they are all that is left."""
    if not token_ids:
        return
    before = words.copy()
    for token_id in token_ids:
        if 0 <= token_id < len(words) * BITS:
            words.view(np.uint32)[token_id // BITS] &= np.uint32(~(1 << token_id % BITS) & 0xFFFFFFFF)
    if not words.any():
        words[:] = before
