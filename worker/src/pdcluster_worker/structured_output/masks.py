"""The masks of a step: which tokens each of its rows may have, filled while the model computes.

A mask depends on the request's own tokens alone.  An end that must not come yet (`min_tokens`,
`ignore_eos`) is barred here too, unless nothing else is left.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.engine.ports import failed_row
from pdcluster_worker.engine.request import EngineRequest, SamplePlace
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.structured_output.grammar_cache import GrammarCache, deep_stacks
from pdcluster_worker.structured_output.matcher import Matcher, OutsideError, SlowError

BITS = 32


@dataclass(frozen=True, slots=True)
class Masks:
    rows: NDArray[np.int64]  # [M], in order, that have a mask
    allowed: NDArray[np.bool_]  # [M, vocab_size]
    errors: dict[int, RequestError]  # of rows outside their grammar, or too slow to follow


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to fill: its matcher, the tokens to feed it, those to look along, and those to bar."""

    row: int
    request_id: str
    matcher: Matcher
    new: list[int]
    guessed: list[int]
    barred: list[int]


class MaskMaker:
    """One per runner."""

    def __init__(self, cache: GrammarCache, vocab_size: int) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None

    def begin(
        self, places: Sequence[SamplePlace], chosen: Mapping[EngineRequest, int]
    ) -> "Future[Masks] | None":
        """Begin to fill the masks of these rows; None where no row is constrained.

        chosen: the token of a request that it has not yet, which the step before has sampled.
        """
        found: list[_Row] = []
        for row, place in enumerate(places):
            if place.sampling.constraint is not None:
                is_new = not found or found[-1].request_id != place.request_id
                found.append(self._row(row, place, chosen, is_new=is_new))
        if not found:
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "masks")
            with deep_stacks():  # a form may be compiled again
                self._pool.submit(int)  # starts the thread
        return self._pool.submit(self._fill, found)

    def close(self) -> None:
        """Wait for the masks under way."""
        if self._pool is not None:
            self._pool.shutdown()

    def _row(
        self, row: int, place: SamplePlace, chosen: Mapping[EngineRequest, int], *, is_new: bool
    ) -> _Row:
        """is_new: the first row of its request, which feeds its matcher."""
        request, drafts = (
            (place, ()) if isinstance(place, EngineRequest) else (place.request, place.drafts)
        )
        matcher = self._cache.matcher(request)
        new = matcher.new_tokens(request) if is_new else []
        guessed = [chosen[request], *drafts] if request in chosen else list(drafts)
        sampling = request.sampling
        is_early = request.num_output_tokens + len(guessed) < sampling.min_tokens
        barred = [*sampling.eos_token_ids] if is_early or sampling.ignore_eos else []
        return _Row(
            row,
            request.request_id,
            matcher,
            new,
            guessed,
            [*barred, *sampling.stop_token_ids] if is_early else barred,
        )

    def _fill(self, rows: list[_Row]) -> Masks:
        words = np.empty(-(-(self._vocab_size + 1) // BITS), dtype=np.uint32)
        masked: list[int] = []
        allowed = np.empty((len(rows), self._vocab_size), dtype=np.bool_)
        errors: dict[int, RequestError] = {}
        for row in rows:
            mask = allowed[len(masked)]
            try:
                is_filled = _filled(row, words)
            except OutsideError as e:
                errors[row.row] = failed_row("outside_grammar", f"request {row.request_id}: {e}")
                continue
            except SlowError as e:
                errors[row.row] = failed_row("slow_grammar", str(e), param=CONSTRAINT_PARAM)
                continue
            if is_filled:
                mask[:] = np.unpackbits(
                    words.view(np.uint8), count=self._vocab_size, bitorder="little"
                )
            elif row.barred:
                mask[:] = True
            else:
                continue
            bar(mask, row.barred)
            masked.append(row.row)
        return Masks(np.array(masked, dtype=np.int64), allowed[: len(masked)], errors)


def _filled(row: _Row, words: NDArray[np.uint32]) -> bool:
    """See `Matcher.fill`.  Raises OutsideError, SlowError."""
    started = time.thread_time()
    row.matcher.feed(row.new)
    fed = time.thread_time()
    is_filled = row.matcher.fill(words, row.guessed)
    ended = time.thread_time()
    row.matcher.spend(ended - started, ended - fed + (fed - started) / max(1, len(row.new)))
    return is_filled


def bar(mask: NDArray[np.bool_], token_ids: list[int]) -> None:
    """Bar these tokens of one row too, unless they are all that is left."""
    known = [token_id for token_id in token_ids if 0 <= token_id < len(mask)]
    before = mask[known]
    mask[known] = False
    if before.any() and not mask.any():
        mask[known] = before
