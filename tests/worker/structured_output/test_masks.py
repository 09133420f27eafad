"""The masks of a step are filled row by row; a grammar that takes too long to follow fails its own
row alone.
"""

import pytest

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, SamplingParams
from pdcluster_worker.structured_output import matcher as matcher_module
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.structured_output.masks import MaskMaker
from tests.worker.structured_output.conftest import VOCAB_SIZE

AMBIGUOUS = Constraint("grammar", 'root ::= root root root | "a" | ""')
PLAIN = Constraint("regex", "a*")


@pytest.fixture
def maker(follow):
    """Makes masks of requests "slow" and "plain"."""
    cache = GrammarCache(VOCAB_SIZE)
    cache._matchers = {"slow": follow(AMBIGUOUS), "plain": follow(PLAIN)}
    maker = MaskMaker(cache, VOCAB_SIZE)
    yield maker
    maker.close()


def masks(maker, num_tokens):
    requests = [
        EngineRequest(
            name,
            [9, *b"a" * num_tokens],
            1,
            SamplingParams(max_tokens=999, seed=0, constraint=constraint),
        )
        for name, constraint in (("slow", AMBIGUOUS), ("plain", PLAIN))
    ]
    return maker.begin(requests, {}).result()


@pytest.mark.parametrize(
    "limits", [{"MAX_SECONDS": 0.05, "SECONDS_PER_TOKEN": 0.0005}, {"MAX_STEP_SECONDS": 0.02}]
)
def test_a_grammar_that_takes_too_long_to_follow_fails_its_request_alone(
    maker, monkeypatch, limits
):
    for name, value in limits.items():
        monkeypatch.setattr(matcher_module, name, value)
    for num_tokens in range(400):
        found = masks(maker, num_tokens)
        if found.errors:
            break
    error = found.errors[0]

    assert (error.status, error.code, error.param) == (400, "slow_grammar", "constraint")
    assert "takes too long to follow, " in error.message
    assert f" s up to token {num_tokens}: make it simpler" in error.message
    assert found.rows.tolist() == [1]
