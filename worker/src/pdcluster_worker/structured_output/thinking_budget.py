"""Free text at the start of an answer that may have so many tokens and must then be closed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.structured_output.structural_tags import TextBudget

MAX_CHARACTER_BYTES = 4


class ThinkingBudget:
    """One engine's view of a budget.  tokens: the bytes of each token of the model."""

    def __init__(self, budget: TextBudget, tokens: Sequence[bytes]) -> None:
        self._budget = budget
        self._tokens = tokens
        self._closing: dict[bytes, NDArray[np.uint32]] = {}

    def bar(self, words: NDArray[np.uint32], output: Sequence[int]) -> None:
        """Once the budget is used up, bar all tokens of a mask but those of the closing text."""
        rest = self._rest(output)
        if rest:
            closing = words & self._mask(rest, len(words))
            if closing.any():  # else a character is incomplete
                words[:] = closing

    def _rest(self, output: Sequence[int]) -> bytes:
        """Return what must still come of the closing text; nothing while there are tokens left."""
        begin, end, most = self._budget.begin, self._budget.end, self._budget.max_tokens
        # each token has a byte or more, so that all is closed after so many
        if not most <= len(output) <= most + len(begin) + len(end) + MAX_CHARACTER_BYTES:
            return b""
        text, num_used = b"", 0
        for token_id in output:
            num_used += len(text) >= len(begin)
            text += self._tokens[token_id]
        thought = text[len(begin) :]
        if not text.startswith(begin) or num_used < most or end in thought:
            return b""
        return next(end[size:] for size in range(len(end), -1, -1) if thought.endswith(end[:size]))

    def _mask(self, rest: bytes, num_words: int) -> NDArray[np.uint32]:
        if rest not in self._closing:
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[
                [
                    index
                    for index, token in enumerate(self._tokens)
                    if token and rest.startswith(token)
                ]
            ] = 1
            self._closing[rest] = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._closing[rest]
