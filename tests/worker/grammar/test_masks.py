"""The masks of a step are filled row by row; a grammar that takes too long to follow fails its own
row alone.
"""

import pytest

from pdcluster_worker.engine.request import Request
from pdcluster_worker.grammar import follower as room
from pdcluster_worker.grammar.book import GrammarBook
from pdcluster_worker.grammar.masks import MaskMaker
from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.messages.requests import Sampling
from tests.worker.grammar.conftest import VOCAB_SIZE

AMBIGUOUS = Constraint("grammar", 'root ::= root root root | "a" | ""')
PLAIN = Constraint("regex", "a*")


@pytest.fixture
def maker(follow):
    """Makes masks of requests "slow" and "plain"."""
    book = GrammarBook(VOCAB_SIZE)
    book._followers = {"slow": follow(AMBIGUOUS), "plain": follow(PLAIN)}
    maker = MaskMaker(book, VOCAB_SIZE)
    yield maker
    maker.close()


def masks(maker, num_tokens):
    requests = [
        Request(
            name,
            [9, *b"a" * num_tokens],
            1,
            Sampling(max_tokens=999, seed=0, constraint=constraint),
        )
        for name, constraint in (("slow", AMBIGUOUS), ("plain", PLAIN))
    ]
    return maker.begin(requests, {}).result()


@pytest.mark.parametrize(
    "limits", [{"MOST_SECONDS": 0.05, "SECONDS_PER_TOKEN": 0.0005}, {"MOST_AT_ONCE": 0.02}]
)
def test_a_grammar_that_takes_too_long_to_follow_fails_its_request_alone(
    maker, monkeypatch, limits
):
    for name, value in limits.items():
        monkeypatch.setattr(room, name, value)
    for num_tokens in range(400):
        found = masks(maker, num_tokens)
        if found.errors:
            break
    error = found.errors[0]

    assert (error.status, error.code, error.param) == (400, "slow_grammar", "constraint")
    assert "takes too long to follow, " in error.message
    assert f" s up to token {num_tokens}: make it simpler" in error.message
    assert found.rows.tolist() == [1]
