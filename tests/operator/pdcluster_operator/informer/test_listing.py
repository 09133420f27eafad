"""Listing what the cache holds: optional kinds may be missing or forbidden, the others may not."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError, NotFoundError
from pdcluster_api.apiserver.kinds import POD_MONITOR, SERVICE, Kind
from pdcluster_operator.informer.cache import Name
from pdcluster_operator.informer.listing import WATCHED, Listing
from tests.operator import bodies

FORBIDDEN = ForbiddenError("User x cannot list resource")


class Api:
    """Has one object of every kind but those that it answers with an error.  is_served: whether it says that it has the kinds at all."""

    def __init__(self, **errors: ClusterError) -> None:
        self.errors, self.num_requests, self.is_served = errors, 0, True

    async def serves(self, kind: Kind) -> bool:
        return self.is_served

    async def list(self, kind: Kind, namespace: str | None, *, labels: str) -> AsyncIterator[dict[str, Any]]:
        yield await self.find(kind, namespace, "chat")

    async def find(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any]:
        self.num_requests += 1
        if kind.name in self.errors:
            raise self.errors[kind.name]
        return bodies.child(kind.name, name)


async def names(listing: Listing, kind: Kind) -> list[str]:
    return [body["kind"] async for body in listing.bodies(kind.name)]


async def test_an_optional_kind_comes_and_goes_with_its_crd():
    api = Api(PodMonitor=NotFoundError("no such kind"))
    listing = Listing(api)
    assert (await names(listing, POD_MONITOR), listing.present, listing.watched()) == ([], set(), WATCHED)
    api.errors.clear()
    assert (await names(listing, POD_MONITOR), listing.present) == (["PodMonitor"], {"PodMonitor"})


async def test_a_forbidden_optional_kind_is_not_watched_nor_listed_and_it_is_known_whether_it_exists(caplog: pytest.LogCaptureFixture):
    api = Api(PodMonitor=FORBIDDEN)
    listing = Listing(api)
    with caplog.at_level(logging.WARNING):
        await listing.forbid("PodMonitor", FORBIDDEN)
    assert listing.forbidden == {"PodMonitor": True}
    api.is_served = False
    assert [await names(listing, POD_MONITOR) for _ in range(3)] == [[], [], []]
    assert listing.forbidden == {"PodMonitor": False}
    assert (api.num_requests, caplog.text.count("User x cannot list resource"), listing.present) == (0, 1, set())
    assert set(WATCHED) - set(listing.watched()) == {POD_MONITOR}


async def test_an_error_does_not_change_what_is_known_of_a_kind():
    listing = Listing(Api(PodMonitor=FORBIDDEN), present={"PodMonitor"})
    with pytest.raises(ForbiddenError):
        await names(listing, POD_MONITOR)
    with pytest.raises(ForbiddenError):
        await listing.body(Name("PodMonitor", "default", "chat"))
    assert (listing.present, listing.forbidden, listing.watched()) == ({"PodMonitor"}, {}, WATCHED)


@pytest.mark.parametrize(("kind", "code"), [("Service", 403), ("PodMonitor", 401)])
async def test_a_kind_that_is_needed_is_not_given_up_and_none_is_for_a_refused_login(kind: str, code: int):
    listing = Listing(Api())
    with pytest.raises(ForbiddenError):
        await listing.forbid(kind, ForbiddenError("no", code=code))
    assert (listing.forbidden, listing.watched()) == ({}, WATCHED)


@pytest.mark.parametrize("error", [FORBIDDEN, NotFoundError("no such kind")], ids=["forbidden", "missing"])
async def test_any_other_kind_has_to_be_there(error: ClusterError):
    listing = Listing(Api(Service=error))
    with pytest.raises(type(error)):
        await names(listing, SERVICE)
    assert listing.forbidden == {}
