"""Answers compared token by token."""

import pytest

from pdcluster_worker.messages.requests import Token


def check(actual: list[list[Token]], expected: list[list[Token]]) -> None:
    assert [[token.token_id for token in answer] for answer in actual] == [
        [token.token_id for token in answer] for answer in expected
    ]
    for mine, theirs in zip(actual, expected, strict=True):
        assert [token.logprob for token in mine] == pytest.approx(
            [token.logprob for token in theirs], abs=1e-3
        )
