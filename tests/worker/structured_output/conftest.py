"""Grammars over a vocabulary of bytes."""

from collections.abc import Callable

import pytest

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.compiler import ConstraintCompiler
from pdcluster_worker.structured_output.matcher import Matcher

END = 256
VOCAB_SIZE = 260
TOKENS = [bytes([n]) for n in range(256)] + 4 * [b""]
"""Token n is byte n; 256 ends an answer, and 257 to 259 are no text."""


@pytest.fixture(scope="session")
def forms() -> ConstraintCompiler:
    return ConstraintCompiler(TOKENS)


@pytest.fixture
def follow(forms: ConstraintCompiler) -> Callable[[Constraint], Matcher]:
    """A matcher of a constraint, at its beginning."""

    def matcher(constraint: Constraint) -> Matcher:
        return Matcher(forms.compile(constraint), [END])

    return matcher
