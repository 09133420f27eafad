"""Requests with a constraint on their answer, and the grammars that are compiled for them."""

from typing import get_args

from pdcluster_worker.messages.constraint import ConstraintKind
from pdcluster_worker.metrics.registering import Registering


class GrammarMetrics(Registering):
    """Constraints by kind, and their compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.structured_requests = self._counter(
            "structured_requests",
            "requests with a constraint on their answer",
            "kind",
            first=get_args(ConstraintKind),
        )
        self.grammar_cache_hits = self._counter(
            "grammar_cache_hits", "of these, those whose constraint was compiled before"
        )
        self.grammar_compile_seconds = self._histogram(
            "grammar_compile_seconds", "one constraint, compiled beside the engine", "outcome"
        )
