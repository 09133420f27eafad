"""The Lease beside a main loop that is held: it is renewed, and lost in time."""

import asyncio
import copy
import threading
import time
from typing import Any

import pytest

from pdcluster_api.apiserver.errors import ConflictError, UnavailableError
from pdcluster_api.apiserver.kinds import Body
from pdcluster_operator.lease import LeaseThread, LeaseTimes

SHORT = LeaseTimes(lease=0.6, renew=0.5, retry=0.01)
LONG = LeaseTimes(lease=600.0, renew=300.0, retry=0.01)
DEADLINE_SECONDS = 30.0


class OneLease:
    """An API server with one Lease; threads: in which it was asked."""

    def __init__(self) -> None:
        self.lease: Body | None = None
        self.is_away = self.is_closed = False
        self.num_writes, self.threads = 0, set[str]()
        self.answer_seconds = 0.0

    async def find(self, *_: object) -> Body | None:
        self.threads.add(threading.current_thread().name)
        if self.is_away:
            raise UnavailableError("the API server is away")
        live = copy.deepcopy(self.lease)
        await asyncio.sleep(self.answer_seconds)
        return live

    async def create(self, _: object, body: Body) -> Body:
        return self._write(body)

    async def replace(self, _: object, body: Body) -> Body:
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("it has changed")
        return self._write(body)

    def _write(self, body: Body) -> Body:
        self.num_writes += 1
        version = {"resourceVersion": str(self.num_writes)}
        self.lease = {**body, "metadata": {**body["metadata"], **version}}
        return self.lease

    async def close(self) -> None:
        self.is_closed = True

    @property
    def holder(self) -> str:
        return str((self.lease or {})["spec"]["holderIdentity"])


def thread_over(lease: OneLease, times: LeaseTimes, **options: Any) -> LeaseThread:
    async def connect() -> Any:
        return lease

    return LeaseThread(connect, "default", "operator", "one", times, **options)


def hold_the_loop_until(is_so: Any) -> None:
    """Without a turn of any task."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_lease_is_renewed_while_the_main_loop_is_held():
    lease = OneLease()
    async with thread_over(lease, LONG) as leadership:
        await leadership.acquire()
        holding = asyncio.create_task(leadership.hold())
        await asyncio.sleep(0)
        before = lease.num_writes
        hold_the_loop_until(lambda: lease.num_writes > before + 20)
        await asyncio.sleep(0)
        assert not holding.done()
        holding.cancel()
        await leadership.release()
    assert (lease.holder, lease.threads, lease.is_closed) == ("", {"lease"}, True)


async def test_a_lease_that_is_given_up_is_not_taken_again_by_a_renewal_that_has_begun():
    lease = OneLease()
    async with thread_over(lease, LONG) as leadership:
        await leadership.acquire()
        lease.answer_seconds = 0.2
        holding = asyncio.create_task(leadership.hold())
        await asyncio.sleep(0.1)  # it looks, and is to write
        holding.cancel()
        await leadership.release()
    assert lease.holder == ""


async def test_a_held_main_loop_is_ended_when_the_lease_is_lost():
    lease, ended = OneLease(), threading.Event()
    async with thread_over(lease, SHORT, end=ended.set) as leadership:
        await leadership.acquire()
        holding = asyncio.create_task(leadership.hold())
        await asyncio.sleep(0)
        lease.is_away = True
        hold_the_loop_until(ended.is_set)
        await asyncio.wait_for(holding, DEADLINE_SECONDS)


async def test_a_main_loop_that_ends_in_time_is_not():
    lease, ended = OneLease(), threading.Event()
    times = LeaseTimes(lease=600.0, renew=0.5, retry=0.01)
    async with thread_over(lease, times, end=ended.set) as leadership:
        await leadership.acquire()
        lease.is_away = True
        await asyncio.wait_for(leadership.hold(), DEADLINE_SECONDS)
    assert not ended.is_set()
    assert not [each for each in threading.enumerate() if each.name == "lease"]


async def test_a_client_that_cannot_be_made_is_an_error_and_leaves_no_thread():
    async def connect() -> Any:
        raise UnavailableError("no credentials")

    with pytest.raises(UnavailableError, match="no credentials"):
        async with LeaseThread(connect, "default", "operator", "one", SHORT):
            pass
    assert not [each for each in threading.enumerate() if each.name == "lease"]
