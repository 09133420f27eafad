"""Connection that makes room for a new one, and the most that this process can have."""

import resource

import pytest

from pdcluster_worker.server.http.limits import OpenConnections
from pdcluster_worker.system.process import fitting


@pytest.fixture
def closed():
    return []


@pytest.fixture
def open_connections(closed):
    return OpenConnections[str](most=2, spare=1, close=closed.append)


def test_the_one_that_has_waited_longest_makes_room(open_connections, closed):
    assert [open_connections.enter(name) for name in "abc"] == [True] * 3
    open_connections.busy("a")
    open_connections.idle("a")  # later than b
    assert open_connections.enter("d")

    assert closed == ["b"]


def test_one_with_a_request_is_never_closed_and_without_an_idle_one_there_is_no_room(
    open_connections, closed
):
    within = [open_connections.enter(name) and open_connections.busy(name) for name in "abc"]
    assert within == [True, True, False]
    assert not open_connections.enter("d")
    assert closed == []
    open_connections.leave("a")

    assert open_connections.enter("d")


def test_requests_are_counted_not_connections(open_connections):
    for name in "abc":
        open_connections.enter(name)
    assert [open_connections.busy("a"), open_connections.busy("b"), open_connections.busy("c")] == [
        True,
        True,
        False,
    ]
    open_connections.idle("a")
    open_connections.idle("c")

    assert open_connections.busy("c")


def test_one_that_has_left_is_not_idle_again(open_connections, closed):
    open_connections.enter("a")
    open_connections.busy("a")
    open_connections.leave("a")
    open_connections.idle("a")
    for name in "bcd":
        open_connections.enter(name)

    assert closed == []


@pytest.mark.parametrize(
    ("files", "fits"), [(1024, 768), (1 << 20, 2048), (100, 1), (resource.RLIM_INFINITY, 2048)]
)
def test_connections_fit_the_files_that_may_be_open(monkeypatch, files, fits):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))

    assert fitting(2048) == fits
