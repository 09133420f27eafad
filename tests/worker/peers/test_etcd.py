"""Every way in which etcd can end a call or a watch is an EtcdError."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from pdcluster_worker.peers.etcd import Etcd, EtcdError, KeyEvent


@pytest.fixture
async def etcd(shared_etcd: Any) -> AsyncIterator[Etcd]:
    async with Etcd(shared_etcd.endpoint, 5.0) as connection:
        yield connection


@pytest.fixture
def folder() -> str:
    return f"/{uuid.uuid4().hex}/"


async def test_read_and_watch_see_a_folder_and_nothing_else(etcd: Etcd, folder: str) -> None:
    lease = await etcd.grant(30)
    await etcd.put(f"{folder}a", b"1", lease)
    await etcd.put(f"{folder[:-1]}0", b"beside", lease)
    listing = await etcd.read(folder)

    async with aclosing(etcd.watch(folder, listing.revision + 1)) as events:
        await etcd.put(f"{folder[:-1]}0", b"beside", lease)
        await etcd.put(f"{folder}b", b"2", lease)
        await etcd.revoke(lease)
        seen = [event async for batch in _until(events, 3) for event in batch]

    assert listing.values == {f"{folder}a": b"1"}
    assert seen[0] == KeyEvent(f"{folder}b", b"2")
    assert {(event.key, event.value) for event in seen[1:]} == {
        (f"{folder}a", None),
        (f"{folder}b", None),
    }


async def test_more_than_grpc_takes_by_itself_is_read(etcd: Etcd, folder: str) -> None:
    lease, value = await etcd.grant(30), b"x" * (1 << 20)
    for number in range(5):
        await etcd.put(f"{folder}{number}", value, lease)

    values = (await etcd.read(folder)).values
    await etcd.revoke(lease)
    assert list(values.values()) == [value] * 5


async def test_read_of_a_key_does_not_see_longer_keys(etcd: Etcd, folder: str) -> None:
    lease = await etcd.grant(30)
    await etcd.put(f"{folder}a0", b"1", lease)

    assert (await etcd.read(f"{folder}a")).values == {}


async def test_watch_from_a_compacted_revision_is_an_error(own_etcd: Any) -> None:
    async with Etcd(own_etcd.endpoint, 5.0) as etcd:
        for value in ("1", "2", "3"):
            own_etcd.ctl("put", "/k", value)
        own_etcd.ctl("compact", str((await etcd.read("/k")).revision))

        with pytest.raises(EtcdError, match="compacted"):
            await anext(aiter(_events(etcd.watch("/k", 1))))


@pytest.mark.parametrize("stop", ["kill", "terminate"])
async def test_watch_ends_in_an_error_when_the_server_goes(own_etcd: Any, stop: str) -> None:
    async with Etcd(own_etcd.endpoint, 5.0) as etcd:
        own_etcd.ctl("put", "/k", "1")
        watching = asyncio.create_task(_drain(etcd.watch("/k", 1)))
        await asyncio.wait_for(watching_began(watching, etcd), 20)

        getattr(own_etcd, stop)()

        with pytest.raises(EtcdError):
            await asyncio.wait_for(watching, 20)


async def test_unreachable_server_is_an_error_at_once(stopped_etcd: Any) -> None:
    async with Etcd(stopped_etcd.endpoint, 5.0) as etcd:
        with pytest.raises(EtcdError, match="connect"):
            await etcd.read("/k")


async def test_lease_that_etcd_does_not_know_cannot_be_kept(etcd: Etcd) -> None:
    with pytest.raises(EtcdError, match="expired"):
        await etcd.keep_alive(12345)


async def test_lease_is_kept(etcd: Etcd) -> None:
    await etcd.keep_alive(await etcd.grant(30))


async def test_cancelled_call_stays_a_cancellation(etcd: Etcd, folder: str) -> None:
    watching = asyncio.create_task(_drain(etcd.watch(folder, 1)))
    await watching_began(watching, etcd)

    watching.cancel()

    with pytest.raises(asyncio.CancelledError):
        await watching


async def watching_began(task: "asyncio.Task[None]", etcd: Etcd) -> None:
    """Let the watch be established: a call made after it on the same connection has
    been answered.
    """
    await asyncio.sleep(0)
    await etcd.read("/k")
    assert not task.done()


async def _drain(batches: AsyncIterator[list[KeyEvent]]) -> None:
    async for _ in batches:
        pass


async def _events(batches: AsyncIterator[list[KeyEvent]]) -> AsyncIterator[KeyEvent]:
    async for batch in batches:
        for event in batch:
            yield event


async def _until(
    batches: AsyncIterator[list[KeyEvent]], number: int
) -> AsyncIterator[list[KeyEvent]]:
    seen = 0
    async for batch in batches:
        seen += len(batch)
        yield batch
        if seen >= number:
            return
