"""Watches of children against a server that says what an API server says seldom: events, bookmarks,
versions that are too old, lines that break off, silence.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web

from pdcluster_api.apiserver.kinds import INFERENCE_POOL, SERVICE, Key
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.informer.watches import (
    ABSENT_SECONDS,
    FAILURES_TO_LIST,
    SELECTOR,
    ObjectLister,
    Watches,
)
from tests.operator import bodies
from tests.operator.pdcluster_api.apiserver.answering_server import (
    Answer,
    AnsweringServer,
    never_answers,
    says,
    says_text,
)

KEY = Key(bodies.NAMESPACE, bodies.NAME)
GONE = {"kind": "Status", "reason": "Expired", "message": "too old resource version", "code": 410}
PATH = "/api/v1/services?"


def says_events(*events: tuple[str, bodies.Body]) -> Answer:
    """A watch that says these events, and ends."""
    return says_text(
        200, "".join(json.dumps({"type": kind, "object": body}) + "\n" for kind, body in events)
    )


def bookmark(version: int) -> tuple[str, bodies.Body]:
    return "BOOKMARK", {"kind": "Service", "metadata": {"resourceVersion": str(version)}}


class Followed:
    """The watch of Services from version 3, and what it led to."""

    def __init__(self, server: AnsweringServer, silence_seconds: float) -> None:
        self.server, self.cache, self.keys = server, Cache(), list[Key]()
        self.cache.put("PDCluster", bodies.cluster())
        listing, self.pauses = ObjectLister(server.client), list[float]()
        self.watches = Watches(
            server.client, listing, self.cache, self.keys.append, silence_seconds, self._sleep
        )
        (self.what,) = listing.selections([SERVICE])
        listing.versions[self.what] = "3"

    async def until_quiet(self) -> None:
        """Follow until the server has given every answer."""
        task = asyncio.create_task(self.watches._follow(self.what))
        async with asyncio.timeout(10):
            while self.server.answers:
                await asyncio.sleep(0)
            while len(self.pauses) < len(self.server.seen) - self.num_lists:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def num_lists(self) -> int:
        """Lists that were asked for."""
        return sum("watch=true" not in path for _, path, _ in self.server.seen)

    @property
    def versions(self) -> list[str | None]:
        """From which version each watch went on; None = a list."""
        queries = [dict(part.split("=") for part in self._query(path)) for path in self._paths]
        return [each.get("resourceVersion") for each in queries]

    @property
    def _paths(self) -> list[str]:
        return [path for _, path, _ in self.server.seen]

    @staticmethod
    def _query(path: str) -> list[str]:
        assert path.startswith(PATH)
        return path.removeprefix(PATH).split("&")

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if not self.server.answers:
            await asyncio.Event().wait()


@asynccontextmanager
async def followed(*answers: Answer, silence_seconds: float = 5.0) -> AsyncIterator[Followed]:
    async with AnsweringServer(list(answers)) as server:
        found = Followed(server, silence_seconds)
        await found.until_quiet()
        yield found


def service(version: int, **changes: Any) -> bodies.Body:
    return bodies.child("Service", "chat", version, **changes)


async def test_events_reach_the_cache_and_enqueue_their_pdcluster_once_each():
    events = ("ADDED", service(5)), ("MODIFIED", service(5)), ("DELETED", service(6))
    async with followed(says_events(*events)) as found:
        assert (found.keys, list(found.cache.children(KEY))) == ([KEY, KEY], [])
        assert unquote(found.server.seen[0][1]).endswith(f"labelSelector={SELECTOR}")


async def test_what_belongs_to_no_pdcluster_enqueues_nothing():
    foreign = service(5, metadata={"ownerReferences": []})
    async with followed(says_events(("ADDED", foreign))) as found:
        assert (found.keys, list(found.cache.children(KEY))) == ([], [])


async def test_a_watch_goes_on_from_the_list_then_from_its_last_event_or_bookmark():
    answers = [says_events(("ADDED", service(5))), says_events(bookmark(9)), says_events()]
    async with followed(*answers) as found:
        assert found.versions == ["3", "5", "9"]
        assert found.pauses == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "gone", [says(410, GONE), says_events(("ERROR", GONE))], ids=["answer", "event"]
)
async def test_a_version_that_is_too_old_is_followed_by_a_list_and_what_it_lacks_is_forgotten(
    gone: Answer,
):
    other = bodies.child("Service", "other", 8)
    listed = says(200, {"metadata": {"resourceVersion": "8"}, "items": [other]})
    answers = [says_events(("ADDED", service(5))), gone, listed, says_events()]
    async with followed(*answers) as found:
        assert found.versions == ["3", "5", None, "8"]
        assert list(found.cache.children(KEY)) == [other]
        assert found.keys == [KEY, KEY, KEY]


async def test_what_came_while_the_kind_was_listed_again_stays():
    async with AnsweringServer([]) as server:
        found = Followed(server, 5.0)

        async def lists_late(request: web.Request) -> web.Response:
            found.cache.put("Service", service(9))  # the answer to a write of ours
            return web.json_response({"metadata": {"resourceVersion": "8"}, "items": []})

        found.cache.put("Service", service(5))
        server.answers += [says(410, GONE), lists_late, says_events()]
        await found.until_quiet()
        assert list(found.cache.children(KEY)) == [service(9)]


@pytest.mark.parametrize(
    "broken",
    [says_text(200, '{"type": "ADDED", "obj'), says_text(200, "<html>"), says(503), says(403)],
    ids=["broken off", "a proxy's page", "busy", "forbidden"],
)
async def test_a_watch_that_breaks_goes_on_where_it_stood_after_growing_pauses(broken: Answer):
    async with followed(broken, broken, says_events(("ADDED", service(5)))) as found:
        assert (found.versions, found.pauses) == (["3", "3", "3"], [1.0, 2.0, 1.0])
        assert found.keys == [KEY]


@pytest.mark.parametrize(
    "refused",
    [says(500), says_events(("ERROR", {"kind": "Status", "message": "no", "code": 500}))],
    ids=["answer", "event"],
)
async def test_a_version_that_is_refused_again_and_again_is_followed_by_a_list(refused: Answer):
    listed = says(200, {"metadata": {"resourceVersion": "2"}, "items": [service(2)]})
    async with followed(*[refused] * FAILURES_TO_LIST, listed, says_events()) as found:
        assert found.versions == [*["3"] * FAILURES_TO_LIST, None, "2"]
        assert found.keys == [KEY]


async def test_a_silent_watch_is_opened_again():
    answers = [never_answers, says_events(("ADDED", service(5)))]
    async with followed(*answers, silence_seconds=0.05) as found:
        assert (found.versions, found.keys) == (["3", "3"], [KEY])


@pytest.mark.parametrize("absent", [says(404), says(403)], ids=["no CRD", "an older chart's role"])
async def test_an_optional_kind_is_watched_once_it_is_there_and_looked_for_again_when_it_is_gone(
    absent: Answer,
):
    async with AnsweringServer([]) as server:
        listing, cache, pauses = ObjectLister(server.client), Cache(), list[float]()

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if not server.answers:
                await asyncio.Event().wait()

        keys = list[Key]()
        watches = Watches(server.client, listing, cache, keys.append, 5.0, sleep)
        (what,) = listing.selections([INFERENCE_POOL])
        there = says(200, {"metadata": {"resourceVersion": "4"}, "items": []})
        event = "ADDED", bodies.child("InferencePool", "chat", 5)
        server.answers += [absent, there, says_events(event), absent, absent]
        task = asyncio.create_task(watches._follow(what))
        async with asyncio.timeout(10):
            while len(pauses) < 4:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert pauses == [ABSENT_SECONDS, 1.0, 1.0, ABSENT_SECONDS]
        assert [path.partition("?")[0] for _, path, _ in server.seen] == [
            "/apis/inference.networking.k8s.io/v1/inferencepools"
        ] * 5
        assert keys[0] == KEY
