"""Grammars over a vocabulary of bytes, compiled in this process; the compile process itself has
tests of its own.
"""

from collections.abc import Callable

import pytest

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.compiler import ConstraintCompiler
from pdcluster_worker.structured_output.matcher import Matcher
from pdcluster_worker.structured_output.native import library

END = 256
VOCAB_SIZE = 260


@pytest.fixture(scope="session")
def forms() -> ConstraintCompiler:
    """Token n is byte n; 256 ends an answer, and 257 to 259 are no text."""
    vocabulary = library().TokenizerInfo(
        [bytes([n]) for n in range(256)] + 4 * [b""], 0, VOCAB_SIZE, [], False
    )
    return ConstraintCompiler(library(), vocabulary, VOCAB_SIZE)


@pytest.fixture
def follow(forms: ConstraintCompiler) -> Callable[[Constraint], Matcher]:
    """A follower of a constraint, at its beginning."""
    return lambda constraint: Matcher(
        library().GrammarMatcher(forms.compile(constraint).compiled, [END], False, -1, None)
    )
