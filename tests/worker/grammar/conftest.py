"""Grammars over a vocabulary of bytes, compiled in this process; the compile process itself has
tests of its own.
"""

from collections.abc import Callable

import pytest

from pdcluster_worker.grammar.follower import Follower
from pdcluster_worker.grammar.forms import Forms
from pdcluster_worker.grammar.native import library
from pdcluster_worker.messages.constraint import Constraint

END = 256
VOCAB_SIZE = 260


@pytest.fixture(scope="session")
def forms() -> Forms:
    """Token n is byte n; 256 ends an answer, and 257 to 259 are no text."""
    vocabulary = library().TokenizerInfo(
        [bytes([n]) for n in range(256)] + 4 * [b""], 0, VOCAB_SIZE, [], False
    )
    return Forms(library(), vocabulary, VOCAB_SIZE)


@pytest.fixture
def follow(forms: Forms) -> Callable[[Constraint], Follower]:
    """A follower of a constraint, at its beginning."""
    return lambda constraint: Follower(
        library().GrammarMatcher(forms.compile(constraint).compiled, [END], False, -1, None)
    )
