"""kopf's side: what is registered and how it is set, and what an event does."""

import asyncio
import inspect
from typing import Any

import kopf
import pytest
from kopf._cogs.structs.references import Resource

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER
from pdcluster_operator.handlers.framework import (
    WatchSettings,
    make_registry,
    make_settings,
    run_watches,
)
from pdcluster_operator.handlers.watch import Watch, register
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.informer.listing import SELECTOR, WATCHED
from tests.operator import bodies

KEY = Key(bodies.NAMESPACE, bodies.NAME)


class Told:
    """A watch, and its calls."""

    def __init__(self) -> None:
        self.keys, self.num_listed, self.cache = list[Key](), 0, Cache()
        self.watch = Watch(self.cache, self.keys.append, self._listed)

    def _listed(self) -> None:
        self.num_listed += 1

    async def event(self, kind: str | None, body: bodies.Body) -> None:
        await self.watch.on_event(event={"type": kind, "object": body}, param=body["kind"])


@pytest.fixture
def registry() -> kopf.OperatorRegistry:
    found = make_registry(in_pod=True)
    register(found, WATCHED, Told().watch)
    return found


async def test_events_reach_the_cache_and_make_their_cluster_due_once_each():
    told, service = Told(), bodies.child("Service", "chat", 5)
    await told.event("ADDED", service)
    await told.event("MODIFIED", service)  # changes nothing
    await told.event("DELETED", service)
    await told.event("DELETED", service)
    assert (told.keys, told.cache.children(KEY), told.num_listed) == ([KEY, KEY], [], 0)


async def test_a_listing_is_told_for_deletions_may_be_missing_from_it():
    told = Told()
    await told.event(None, bodies.cluster())
    assert (told.keys, told.num_listed) == ([KEY], 1)


async def test_what_is_nobodys_makes_nothing_due():
    told = Told()
    await told.event("ADDED", bodies.child("Service", "chat", metadata={"ownerReferences": []}))
    assert told.keys == []


def test_only_low_level_async_handlers_are_registered_so_kopf_writes_nothing_to_an_object(
    registry: kopf.OperatorRegistry,
):
    handlers = list(registry._watching.get_all_handlers())
    assert {handler.param for handler in handlers} == {
        kind.name for kind in (PDCLUSTER, *CHILDREN)
    } | {"Pod"}
    assert all(inspect.iscoroutinefunction(handler.fn) for handler in handlers)
    others = (registry._changing, registry._spawning, registry._indexing, registry._webhooks)
    assert [list(each.get_all_handlers()) for each in others] == [[], [], [], []]


@pytest.mark.parametrize("kind", WATCHED, ids=str)
def test_the_api_server_sends_only_our_objects_and_every_pdcluster(kind):
    group, _, version = kind.api_version.rpartition("/")
    resource = Resource(
        group=group,
        version=version,
        plural=kind.plural,
        kind=kind.name,
        preferred=True,
        verbs=frozenset({"list", "watch"}),
    )
    assert make_settings(WATCHED).watching.label_selectors.collect(resource) == (
        [] if kind == PDCLUSTER else [SELECTOR]
    )


def test_watches_end_in_time_requests_are_short_and_nothing_is_posted():
    settings = make_settings(WATCHED)
    watching, networking = settings.watching, settings.networking
    assert 0 < watching.server_timeout < watching.client_timeout <= 300
    assert 60 < watching.inactivity_timeout < 120  # the API server sends a bookmark every minute
    assert (watching.connect_timeout, networking.connect_timeout, networking.request_timeout) == (
        5,
        5,
        30,
    )
    assert len(list(networking.error_backoffs)) == 5
    assert (
        settings.posting.enabled,
        settings.peering.standalone,
        settings.execution.max_workers,
    ) == (False, True, 1)


class Kopf:
    """Runs until it is stopped, as kopf's operator."""

    def __init__(self) -> None:
        self.registered: set[str] = set()

    async def operator(
        self, *, registry: kopf.OperatorRegistry, stop_flag: asyncio.Event, **_: Any
    ) -> None:
        self.registered = {str(handler.param) for handler in registry._watching.get_all_handlers()}
        await stop_flag.wait()


async def test_every_kind_is_watched_until_the_stop(monkeypatch: pytest.MonkeyPatch):
    fake, stop = Kopf(), asyncio.Event()
    monkeypatch.setattr(kopf, "operator", fake.operator)
    stop.set()
    async with asyncio.timeout(10):
        await run_watches(WatchSettings(), Told().watch, stop, asyncio.Event())
    assert fake.registered == {kind.name for kind in WATCHED}
