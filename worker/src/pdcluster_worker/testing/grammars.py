"""Grammars for tests of the engine, compiled at a call; no text is looked at."""

from pdcluster_worker.engine.ports import GrammarCounts
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import RequestError


class FakeGrammars:
    """An `engine.ports.Grammars` that compiles at a call.

    compiled: texts that are; wrong: why others cannot be.
    begun:    texts, in order, of the requests that asked.
    """

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.wrong: dict[str, RequestError] = {}
        self.begun: list[str] = []

    def begin(self, request: EngineRequest) -> None:
        """See ports.Grammars."""
        self.begun.append(_text_of(request))

    def open(self, request: EngineRequest) -> bool | RequestError:
        """See ports.Grammars."""
        text = _text_of(request)
        return self.wrong.get(text, text in self.compiled)

    def take_counts(self) -> GrammarCounts:
        """See ports.Grammars."""
        return GrammarCounts()


def _text_of(request: EngineRequest) -> str:
    assert request.sampling.constraint is not None
    return request.sampling.constraint.text
