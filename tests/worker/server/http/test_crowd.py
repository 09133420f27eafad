"""Connection that makes room for a new one, and the most that this process can have."""

import resource

import pytest

from pdcluster_worker.machine.open_files import fitting
from pdcluster_worker.server.http.crowd import OpenConnections


@pytest.fixture
def closed():
    return []


@pytest.fixture
def crowd(closed):
    return OpenConnections[str](most=2, spare=1, close=closed.append)


def test_the_one_that_has_waited_longest_makes_room(crowd, closed):
    assert [crowd.enter(name) for name in "abc"] == [True] * 3
    crowd.busy("a")
    crowd.idle("a")  # later than b
    assert crowd.enter("d")

    assert closed == ["b"]


def test_one_with_a_request_is_never_closed_and_without_an_idle_one_there_is_no_room(crowd, closed):
    within = [crowd.enter(name) and crowd.busy(name) for name in "abc"]
    assert within == [True, True, False]
    assert not crowd.enter("d")
    assert closed == []
    crowd.leave("a")

    assert crowd.enter("d")


def test_requests_are_counted_not_connections(crowd):
    for name in "abc":
        crowd.enter(name)
    assert [crowd.busy("a"), crowd.busy("b"), crowd.busy("c")] == [True, True, False]
    crowd.idle("a")
    crowd.idle("c")

    assert crowd.busy("c")


def test_one_that_has_left_is_not_idle_again(crowd, closed):
    crowd.enter("a")
    crowd.busy("a")
    crowd.leave("a")
    crowd.idle("a")
    for name in "bcd":
        crowd.enter(name)

    assert closed == []


@pytest.mark.parametrize(
    ("files", "fits"), [(1024, 768), (1 << 20, 2048), (100, 1), (resource.RLIM_INFINITY, 2048)]
)
def test_connections_fit_the_files_that_may_be_open(monkeypatch, files, fits):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))

    assert fitting(2048) == fits
