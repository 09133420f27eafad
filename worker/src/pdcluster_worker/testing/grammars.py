"""Grammars for engine tests, compiled by the test."""

from pdcluster_worker.engine.ports import GrammarCounts
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import RequestError


class FakeGrammars:
    """compiled: texts that are; wrong: errors of others.
    begun:    texts of requests, in order.
    """

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.wrong: dict[str, RequestError] = {}
        self.begun: list[str] = []

    def begin(self, request: EngineRequest) -> None:
        self.begun.append(_text_of(request))

    def open(self, request: EngineRequest) -> bool | RequestError:
        text = _text_of(request)
        return self.wrong.get(text, text in self.compiled)

    def take_counts(self) -> GrammarCounts:
        return GrammarCounts()


def _text_of(request: EngineRequest) -> str:
    assert request.sampling.constraint is not None
    return request.sampling.constraint.text
