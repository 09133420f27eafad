"""kopf: what is registered and how it is set, what an event does, and uses of its private parts:
those fail when a release moves or renames one.
"""

import ast
import asyncio
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kopf
import pytest
from kopf._cogs.clients import api, fetching
from kopf._core.reactor import processing

from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator import kopf_watch
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.kopf_watch import (
    NoMemories,
    Watch,
    WatchSettings,
    make_registry,
    make_settings,
    read_json_of_any_depth,
    register,
    run_watches,
)
from tests.operator import bodies

HOME = Path(kopf_watch.__file__)
SOURCES = HOME.parents[1]


def private_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import from kopf that is not of its public package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kopf._"):
            yield from ((str(node.module), each.name) for each in node.names)
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.startswith("kopf._"))


def test_only_one_file_imports_private_parts_of_kopf():
    files = sorted(SOURCES.rglob("*.py"))

    assert [path for path in files if any(private_imports(path))] == [HOME]


@pytest.mark.parametrize(("module", "name"), list(private_imports(HOME)))
def test_each_of_them_is_where_it_is_imported_from(module: str, name: str):
    assert hasattr(importlib.import_module(module), name), (
        f"kopf has moved {module}.{name}: change {HOME.name}"
    )


def test_kopf_takes_memories_of_ours_and_asks_them_as_we_answer():
    assert "memories" in inspect.signature(kopf.operator).parameters
    source = inspect.getsource(processing.process_resource_event)
    assert (
        "await memories.recall(raw_body, noticed_by_listing=raw_type is None, memobase=memobase)"
        in source
    )


async def test_kopf_remembers_nothing_of_an_object():
    memories, body = NoMemories(), bodies.cluster()
    first = await memories.recall(body, noticed_by_listing=True, memobase=None)
    assert await memories.recall(body, noticed_by_listing=False, memobase=None) is not first
    assert list(memories.iter_all_memories()) == []
    await memories.forget(body)


def test_kopf_reads_lists_and_watches_where_ours_takes_the_place_of_its_own():
    get, stream = inspect.getsource(api), inspect.getsource(api.stream)
    assert "return await response.json()" in get
    assert "yield json.loads(line.decode('utf-8'))" in stream
    assert "await api.get(" in inspect.getsource(fetching)


def test_kopf_reads_objects_of_very_many_levels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "json", api.json)
    monkeypatch.setattr(api, "get", api.get)
    read_json_of_any_depth()
    assert api.json.loads('{"a":' * 5000 + "1" + "}" * 5000)["a"]


KEY = Key(bodies.NAMESPACE, bodies.NAME)


class RecordedWatch:
    """A watch, and its calls."""

    def __init__(self) -> None:
        self.keys, self.num_listed, self.cache = list[Key](), 0, Cache()
        self.watch = Watch(self.cache, self.keys.append, self._listed)

    def _listed(self) -> None:
        self.num_listed += 1

    async def event(self, kind: str | None, body: bodies.Body) -> None:
        await self.watch.on_event(event={"type": kind, "object": body})


@pytest.fixture
def registry() -> kopf.OperatorRegistry:
    found = make_registry(in_pod=True)
    register(found, RecordedWatch().watch)
    return found


async def test_events_reach_the_cache_and_make_their_cluster_due_once_each():
    told, cluster = RecordedWatch(), bodies.cluster()
    await told.event("ADDED", cluster)
    await told.event("MODIFIED", cluster)  # changes nothing
    await told.event("DELETED", cluster)
    await told.event("DELETED", cluster)
    assert (told.keys, len(told.cache), told.num_listed) == ([KEY, KEY], 0, 0)


async def test_a_listing_is_reported_because_deletions_may_be_missing_from_it():
    told = RecordedWatch()
    await told.event(None, bodies.cluster())
    assert (told.keys, told.num_listed) == ([KEY], 1)


def test_only_low_level_async_handlers_are_registered_so_kopf_writes_nothing_to_an_object(
    registry: kopf.OperatorRegistry,
):
    handlers = list(registry._watching.get_all_handlers())
    assert [handler.id for handler in handlers] == ["pdclusters"]
    assert all(inspect.iscoroutinefunction(handler.fn) for handler in handlers)
    others = (registry._changing, registry._spawning, registry._indexing, registry._webhooks)
    assert [list(each.get_all_handlers()) for each in others] == [[], [], [], []]


def test_watches_end_in_time_requests_are_short_and_nothing_is_posted():
    settings = make_settings(WatchSettings())
    watching, networking = settings.watching, settings.networking
    assert 0 < watching.server_timeout < watching.client_timeout <= 300
    assert 60 < watching.inactivity_timeout < 120  # the API server sends a bookmark every minute
    assert make_settings(WatchSettings(silence_seconds=5.0)).watching.inactivity_timeout == 5.0
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


@pytest.mark.parametrize("namespaces", [(), ("models",)])
def test_kopf_asks_for_namespaces_and_crds_only_where_all_are_watched(namespaces: tuple[str, ...]):
    settings = make_settings(WatchSettings(namespaces))
    assert settings.scanning.disabled == bool(namespaces)


class Kopf:
    """Runs until it is stopped, as kopf's operator."""

    def __init__(self) -> None:
        self.registered: set[str] = set()

    async def operator(
        self, *, registry: kopf.OperatorRegistry, stop_flag: asyncio.Event, **_: Any
    ) -> None:
        self.registered = {str(handler.id) for handler in registry._watching.get_all_handlers()}
        await stop_flag.wait()


async def test_pdclusters_are_watched_until_the_stop(monkeypatch: pytest.MonkeyPatch):
    fake, stop = Kopf(), asyncio.Event()
    monkeypatch.setattr(kopf, "operator", fake.operator)
    stop.set()
    async with asyncio.timeout(10):
        await run_watches(WatchSettings(), RecordedWatch().watch, stop, asyncio.Event())
    assert fake.registered == {"pdclusters"}
