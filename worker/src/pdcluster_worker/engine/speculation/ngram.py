"""Drafts from the request's own tokens: what followed its last tokens where they stood before."""

from collections.abc import Sequence

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine_settings import SpeculationSettings

_LETTERS = 0x110000
"""Tokens are searched as letters of a string; of a larger vocabulary some share one, and the guess
is a worse one.
"""


class NgramDrafter:
    """Keeps the tokens of each request as a string, which is searched at memory's speed."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._most, self._least = settings.prompt_lookup_max, settings.prompt_lookup_min
        self._texts: dict[str, str] = {}

    def may_follow(self, request: EngineRequest) -> bool:
        """A match of the known tokens often goes on with one token more."""
        return self._find(self._text(request), self._least) >= 0

    def draft(self, requested: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        return [self._draft(request, num_tokens) for request, num_tokens in requested]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _draft(self, request: EngineRequest, num_tokens: int) -> list[int]:
        text = self._text(request)
        if self._find(text, self._least) < 0:
            return []
        for length in range(self._most, self._least - 1, -1):
            if (place := self._find(text, length)) >= 0:
                # Of the request, whose tokens need not be letters.
                return request.tokens[place + length : place + length + num_tokens]
        return []

    def _find(self, text: str, length: int) -> int:
        """The earliest place of the last `length` letters before their own; -1 = none."""
        return text.find(text[-length:], 0, len(text) - 1) if len(text) > length else -1

    def _text(self, request: EngineRequest) -> str:
        text = self._texts.get(request.request_id, "")
        if len(text) < request.num_tokens:
            text += "".join([chr(token % _LETTERS) for token in request.tokens[len(text) :]])
            self._texts[request.request_id] = text
        return text
