"""Listing what the cache holds: every kind has to be there, and what is not ours is left out."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdcluster_api.apiserver.client import ListPage
from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError, NotFoundError
from pdcluster_api.apiserver.kinds import INFERENCE_POOL, PDCLUSTER, SERVICE, Kind
from pdcluster_operator.informer.cache import Name
from pdcluster_operator.informer.watches import SELECTOR, ObjectLister
from pdcluster_schema.labels import MANAGED_BY
from tests.operator import bodies


class Api:
    """Has one object of every kind in every namespace; error: its answer to anything."""

    def __init__(self, error: ClusterError | None = None) -> None:
        self.error = error
        self.requested: list[tuple[str, str | None, str]] = []

    async def pages(
        self, kind: Kind, namespace: str | None, *, labels: str
    ) -> AsyncIterator[ListPage]:
        self.requested.append((kind.name, namespace, labels))
        yield ListPage([await self.find(kind, namespace, "chat")], "7")

    async def find(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return bodies.child(kind.name, name)


async def test_children_are_listed_by_their_label_in_every_namespace():
    api = Api()
    listing = ObjectLister(api, ("models", "research"))
    assert len([body async for body in listing.bodies(SERVICE.name)]) == 2
    assert len([body async for body in listing.bodies(PDCLUSTER.name)]) == 2
    assert api.requested == [
        *(("Service", namespace, SELECTOR) for namespace in ("models", "research")),
        *(("PDCluster", namespace, "") for namespace in ("models", "research")),
    ]


async def test_a_watch_of_a_kind_goes_on_from_the_version_of_its_last_whole_list():
    listing = ObjectLister(Api(), ("models",))
    (what,) = listing.selections([SERVICE])
    async for _ in listing.of(what):
        assert listing.versions == {}
    assert listing.versions == {what: "7"}


@pytest.mark.parametrize(
    "error", [ForbiddenError("no"), NotFoundError("no such kind")], ids=["forbidden", "missing"]
)
async def test_every_kind_of_ours_has_to_be_there(error: ClusterError):
    with pytest.raises(type(error)):
        [body async for body in ObjectLister(Api(error)).bodies(SERVICE.name)]


async def test_an_object_that_lost_our_label_is_none_of_ours(monkeypatch: pytest.MonkeyPatch):
    listing, name = ObjectLister(Api()), Name("Service", "default", "chat")
    assert await listing.body(name) is not None
    foreign = bodies.child("Service", "chat")
    foreign["metadata"]["labels"][MANAGED_BY] = "me"
    monkeypatch.setattr(bodies, "child", lambda *_: foreign)
    assert await listing.body(name) is None


async def test_optional_kind_that_is_not_there_has_no_objects_and_no_version():
    listing = ObjectLister(Api(NotFoundError("no such kind")))
    (what,) = listing.selections([INFERENCE_POOL])
    assert [body async for body in listing.of(what)] == []
    assert listing.versions == {}
    with pytest.raises(ForbiddenError):
        [body async for body in ObjectLister(Api(ForbiddenError("no"))).bodies(INFERENCE_POOL.name)]
