"""Challenges: each is answered once, in its time, and is this process's own."""

import pytest

from pdcluster_worker.server.state_routes import SECONDS, Challenges


def test_each_is_good_for_one_proof() -> None:
    given = Challenges()
    first, second = given.new(), given.new()

    assert first != second
    assert [given.use(first), given.use(first), given.use(second)] == [True, False, True]


@pytest.mark.parametrize(("seconds", "is_good"), [(SECONDS, True), (SECONDS + 1, False)])
def test_an_old_one_is_worth_nothing(seconds: float, *, is_good: bool) -> None:
    now = [100.0]
    given = Challenges(lambda: now[0])
    challenge = given.new()
    now[0] += seconds

    assert given.use(challenge) is is_good


def test_one_that_was_used_is_forgotten_only_when_it_is_too_old() -> None:
    now = [100.0]
    given = Challenges(lambda: now[0])
    first = given.new()
    assert given.use(first)
    for _ in range(3):
        now[0] += SECONDS / 2
        assert given.use(given.new())
        assert not given.use(first)


@pytest.mark.parametrize("text", ["", ".", "1.0", "1.0.aa.bb", "x" * 100, "\u00e4"])
def test_what_this_process_has_not_given_is_worth_nothing(text: str) -> None:
    assert not Challenges().use(text)
    assert not Challenges().use(Challenges().new())
