"""Connection that makes room for a new one, and the most that this process can have."""

import asyncio
import resource

import pytest

from pdcluster_worker.server.http.limits import OpenConnections
from pdcluster_worker.system.process import fitting


class Client(asyncio.Transport):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def entered(number: int) -> tuple[OpenConnections, list[Client]]:
    """For 2 with an open request and 1 more, with so many clients."""
    connections, clients = OpenConnections(most=2, spare=1), [Client() for _ in range(number)]
    assert all(connections.enter(client) for client in clients)
    return connections, clients


def test_the_one_that_has_waited_longest_makes_room() -> None:
    connections, (a, b, c) = entered(3)
    connections.busy(a)
    connections.idle(a)  # later than b
    assert connections.enter(Client())

    assert [each.is_closed for each in (a, b, c)] == [False, True, False]


def test_one_with_a_request_is_never_closed_and_without_an_idle_one_there_is_no_room() -> None:
    connections, clients = entered(3)
    assert [connections.busy(each) for each in clients] == [True, True, False]
    assert not connections.enter(Client())
    assert not any(each.is_closed for each in clients)
    connections.leave(clients[0])

    assert connections.enter(Client())


def test_requests_are_counted_not_connections() -> None:
    connections, (a, b, c) = entered(3)
    assert [connections.busy(each) for each in (a, b, c)] == [True, True, False]
    connections.idle(a)
    connections.idle(c)

    assert connections.busy(c)


def test_one_that_has_left_is_not_idle_again() -> None:
    connections, (a,) = entered(1)
    connections.busy(a)
    connections.leave(a)
    connections.idle(a)
    assert all(connections.enter(Client()) for _ in range(3))

    assert not a.is_closed


@pytest.mark.parametrize(
    ("files", "fits"), [(1024, 768), (1 << 20, 2048), (100, 1), (resource.RLIM_INFINITY, 2048)]
)
def test_connections_fit_the_files_that_may_be_open(monkeypatch, files, fits):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))

    assert fitting(2048) == fits
