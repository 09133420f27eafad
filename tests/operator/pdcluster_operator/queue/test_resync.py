"""The resync against a listing that a test writes: what a watch missed is found, an ordinary delay
is not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from pdcluster_api.apiserver.errors import ForbiddenError
from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.informer.cache import Cache, Name
from pdcluster_operator.queue.resync import QueueHealth, Resync
from pdcluster_operator.queue.work_queue import WorkQueue
from tests.operator import bodies as made

KEY = Key(made.NAMESPACE, made.NAME)


class WrittenListing:
    """The API server's objects.

    meanwhile:   what happens between the listing and its check
    during_read: what happens between the read of an object and its answer
    """

    kinds = ("PDCluster", "Service")

    def __init__(self, *objects: made.Body) -> None:
        self.objects = {
            Name(body["kind"], "default", body["metadata"]["name"]): body for body in objects
        }
        self.meanwhile: Callable[[], object] = lambda: None
        self.during_read: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}

    async def bodies(self, kind: str) -> AsyncIterator[made.Body]:
        if self.error is not None:
            raise self.error
        for name, body in list(self.objects.items()):
            if name.kind == kind:
                yield body
        if kind in self.errors:  # in the next namespace
            raise self.errors[kind]
        if kind == self.kinds[-1]:
            self.meanwhile()

    async def body(self, name: Name) -> made.Body | None:
        body = self.objects.get(name)
        self.during_read()
        return body


class Run:
    """A resync with a cache, and the keys that it enqueued."""

    def __init__(self, *objects: made.Body, grace_seconds: float = 0.0) -> None:
        self.listing, self.cache, self.keys = WrittenListing(*objects), Cache(), list[Key]()
        self.progress = QueueHealth(resync_seconds=1000.0, resynced=time.monotonic())
        self.resync = Resync(
            self.listing, self.cache, self.keys.append, self.progress, grace_seconds
        )

    def problems(self) -> list[str]:
        return self.progress.problems(WorkQueue(), time.monotonic())


CLUSTER = made.cluster()
SERVICE = made.child("Service", "chat", 5)


async def test_fill_takes_everything_that_belongs_to_a_cluster():
    run = Run(CLUSTER, SERVICE, made.child("Service", "foreign", metadata={"ownerReferences": []}))
    await run.resync.fill()
    assert list(run.cache.children(KEY)) == [SERVICE]
    assert len(run.cache) == 2


async def test_a_pass_looks_at_every_cluster_again_and_finds_nothing_missed():
    run = Run(CLUSTER, SERVICE, made.child("Service", "foreign", metadata={"ownerReferences": []}))
    await run.resync.fill()
    for _ in range(3):
        await run.resync.once()
    assert (run.keys, run.problems()) == ([KEY] * 3, [])


@pytest.mark.parametrize("change", ["added", "changed", "deleted", "restored"])
async def test_what_no_watch_reported_is_carried_into_the_cache_and_a_silent_watch_is_a_problem(
    change: str,
):
    run = Run(CLUSTER) if change == "added" else Run(CLUSTER, SERVICE)
    await run.resync.fill()
    name = Name("Service", "default", "chat")
    for attempt in range(2):
        if change == "deleted":
            now = [] if attempt == 0 else [made.child("Service", "chat", 9)]
        elif change == "restored":  # from a backup of etcd: versions go back
            now = [made.child("Service", "chat", 4 - attempt)]
        else:
            now = [made.child("Service", "chat", 7 + attempt)]
        run.listing.objects = {
            Name("PDCluster", "default", "chat"): CLUSTER,
            **({name: now[0]} if now else {}),
        }
        await run.resync.once()
        assert list(run.cache.children(KEY)) == now
    assert run.problems() == ["the watch of Service is silent"]


async def test_what_a_watch_reported_meanwhile_is_not_missed():
    run = Run(CLUSTER, SERVICE)
    await run.resync.fill()
    newer = made.child("Service", "chat", 6)
    for _ in range(3):
        run.listing.objects[Name("Service", "default", "chat")] = newer
        run.listing.meanwhile = lambda: run.cache.put("Service", newer)
        await run.resync.once()
    assert run.problems() == []


async def test_an_object_that_was_deleted_meanwhile_does_not_come_back():
    run = Run(CLUSTER)
    await run.resync.fill()
    new = made.child("Service", "chat", 6)
    run.listing.objects[Name("Service", "default", "chat")] = new
    run.listing.meanwhile = lambda: run.listing.objects.pop(
        Name("Service", "default", "chat"), None
    )
    await run.resync.once()
    assert list(run.cache.children(KEY)) == []


async def test_what_is_forbidden_ends_the_pass_and_changes_nothing():
    run = Run(CLUSTER, SERVICE)
    await run.resync.fill()
    run.listing.errors["Service"] = ForbiddenError("no right")
    with pytest.raises(ForbiddenError):
        await run.resync.once()
    assert (list(run.cache.children(KEY)), run.keys) == ([SERVICE], [])


async def test_a_failed_check_is_logged_and_a_request_has_pdclusters_checked(caplog):
    run = Run(CLUSTER)
    await run.resync.fill()
    run.listing.error = RuntimeError("the API server is away")
    task = asyncio.create_task(run.resync.run())
    async with asyncio.timeout(10):
        run.resync.request()
        while "resync failed" not in caplog.text:
            await asyncio.sleep(0)
        run.listing.error = None
        run.listing.objects.clear()
        run.resync.request()
        while not run.keys:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert run.keys[0] == KEY


async def test_what_a_watch_reported_during_the_read_stays():
    run = Run(CLUSTER, SERVICE)
    await run.resync.fill()
    stale, newer = made.child("Service", "chat", 6), made.child("Service", "chat", 7)
    run.listing.objects[Name("Service", "default", "chat")] = stale
    run.listing.during_read = lambda: run.cache.put("Service", newer)
    await run.resync.once()
    assert list(run.cache.children(KEY)) == [newer]
    assert run.problems() == []


async def test_an_object_that_was_made_after_a_read_without_one_stays():
    run = Run(CLUSTER, SERVICE)
    await run.resync.fill()
    again = made.child("Service", "chat", 9)
    del run.listing.objects[Name("Service", "default", "chat")]
    run.listing.during_read = lambda: run.cache.put("Service", again)
    await run.resync.once()
    assert list(run.cache.children(KEY)) == [again]
