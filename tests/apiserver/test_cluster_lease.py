"""Leader election of two candidates on the real API server, with short times."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from pdcluster_api.apiserver.client import ClientLimits
from pdcluster_api.apiserver.kinds import LEASE
from pdcluster_operator.lease import Leadership, LeaseTimes
from tests.apiserver.cluster_client import Connection, connected
from tests.apiserver.control_plane import ControlPlane

TIMES = LeaseTimes(lease=2.0, renew=1.2, retry=0.1)
LIMITS = ClientLimits(timeout_seconds=1.0, tries=1)
NAME = "operator"
TOO_LONG_SECONDS = 30.0


@pytest_asyncio.fixture
async def connection(control_plane: ControlPlane) -> AsyncIterator[Connection]:
    async with connected(control_plane.kubeconfig, LIMITS) as made:
        yield made


def candidate(connection: Connection, namespace: str, identity: str, **options: Any) -> Leadership:
    return Leadership(connection.client, namespace, NAME, identity, **{"times": TIMES, **options})


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator["asyncio.Task[None]"]:
    """A task that ends with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def spec(connection: Connection, namespace: str) -> dict[str, Any]:
    content: dict[str, Any] = (await connection.get(LEASE, namespace, NAME))["spec"]
    return content


async def test_the_first_candidate_leads_and_renews(connection: Connection, namespace: str):
    one = candidate(connection, namespace, "one")
    assert not one.is_leader
    await one.acquire()
    assert one.is_leader
    first = await spec(connection, namespace)
    assert (first["holderIdentity"], first["leaseDurationSeconds"], first["leaseTransitions"]) == (
        "one",
        2,
        1,
    )
    async with running(one.hold()) as holding:
        while (await spec(connection, namespace))["renewTime"] == first["renewTime"]:
            await asyncio.sleep(0.02)
        assert not holding.done()
    renewed = await spec(connection, namespace)
    assert {**renewed, "renewTime": ""} == {**first, "renewTime": ""}


async def test_a_released_lease_is_taken_at_once(connection: Connection, namespace: str):
    # With a lease time far beyond the test's, only the release can let the second in.
    slow = LeaseTimes(lease=600.0, renew=500.0, retry=0.05)
    one, two = (candidate(connection, namespace, name, times=slow) for name in ("one", "two"))
    await one.acquire()
    async with running(two.acquire()) as acquiring:
        await one.release()
        await asyncio.wait_for(acquiring, TOO_LONG_SECONDS)
    assert (one.is_leader, two.is_leader) == (False, True)
    now = await spec(connection, namespace)
    assert (now["holderIdentity"], now["leaseTransitions"]) == ("two", 3)  # given up, then taken


async def test_release_of_another_s_lease_does_nothing(connection: Connection, namespace: str):
    one, two = (candidate(connection, namespace, name) for name in ("one", "two"))
    await two.release()
    await one.acquire()
    await two.release()
    assert (await spec(connection, namespace))["holderIdentity"] == "one"


async def test_a_leader_that_is_gone_is_replaced_after_the_lease_time_only(
    connection: Connection, namespace: str
):
    clock = FakeClock()
    one, two = (
        candidate(connection, namespace, name, clock=clock, sleep=clock.sleep)
        for name in ("one", "two")
    )
    await one.acquire()  # and never renews
    clock.now += 100.0  # what passed before `two` saw the record counts for nothing
    started = clock.now
    await asyncio.wait_for(two.acquire(), TOO_LONG_SECONDS)
    assert TIMES.lease <= clock.now - started <= TIMES.lease + 2 * TIMES.retry
    assert not one.is_leader


async def test_a_leader_that_renews_is_not_replaced(connection: Connection, namespace: str):
    clock = FakeClock()
    two = candidate(connection, namespace, "two", clock=clock, sleep=clock.sleep)
    one = candidate(connection, namespace, "one", clock=clock)
    await one.acquire()

    async def renew_then_sleep(seconds: float) -> None:
        clock.now += seconds
        await one.acquire()
        if clock.now > 10 * TIMES.lease:
            raise TimeoutError

    two.sleep = renew_then_sleep
    with pytest.raises(TimeoutError):
        await two.acquire()
    assert (await spec(connection, namespace))["holderIdentity"] == "one"


async def test_a_leader_whose_lease_is_another_s_stops_at_once(
    connection: Connection, control_plane: ControlPlane, namespace: str
):
    one = candidate(
        connection, namespace, "one", times=LeaseTimes(lease=600.0, renew=500.0, retry=0.05)
    )
    await one.acquire()
    control_plane.kubectl(
        "-n",
        namespace,
        "patch",
        "lease",
        NAME,
        "--type=merge",
        "-p",
        json.dumps({"spec": {"holderIdentity": "another"}}),
    )
    await asyncio.wait_for(one.hold(), TOO_LONG_SECONDS)
    assert not one.is_leader
    assert (await spec(connection, namespace))["holderIdentity"] == "another"


async def test_a_deleted_lease_is_made_again_by_its_leader(
    connection: Connection, control_plane: ControlPlane, namespace: str
):
    one = candidate(connection, namespace, "one")
    await one.acquire()
    control_plane.kubectl("-n", namespace, "delete", "lease", NAME)
    async with running(one.hold()):
        while (await connection.client.find(LEASE, namespace, NAME)) is None:
            await asyncio.sleep(0.02)
    assert one.is_leader


async def test_two_candidates_at_once_make_one_leader(connection: Connection, namespace: str):
    candidates = [candidate(connection, namespace, f"candidate-{number}") for number in range(5)]
    async with asyncio.TaskGroup() as group:
        trying = [group.create_task(each.acquire()) for each in candidates]
        await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
        leaders = [each for each in candidates if each.is_leader]
        for task in trying:
            task.cancel()
    assert [each.identity for each in leaders] == [
        (await spec(connection, namespace))["holderIdentity"]
    ]


async def test_a_candidate_without_rights_waits_and_says_why(
    control_plane: ControlPlane, namespace: str, caplog: pytest.LogCaptureFixture
):
    class EnoughError(Exception):
        pass

    async def once(seconds: float) -> None:
        raise EnoughError

    async with connected(control_plane.kubeconfig_for("no-rights"), LIMITS) as limited:
        with pytest.raises(EnoughError):
            await candidate(limited, namespace, "one", sleep=once).acquire()
    assert 'User "no-rights" cannot get resource "leases"' in caplog.text


async def test_a_leader_that_cannot_renew_has_lost_before_another_can_take_over(
    own_plane: ControlPlane, caplog: pytest.LogCaptureFixture
):
    async with connected(own_plane.kubeconfig, LIMITS) as made:
        one = candidate(made, "default", "one")
        await one.acquire()
        own_plane.stop()
        await asyncio.wait_for(one.hold(), TOO_LONG_SECONDS)
        assert not one.is_leader
        assert "lost the lease" in caplog.text
        await one.release()  # no server: logged, not raised
        assert "lease not released" in caplog.text
        own_plane.start()
        two = candidate(made, "default", "two")
        await asyncio.wait_for(two.acquire(), TOO_LONG_SECONDS)
        assert two.is_leader


@pytest.mark.parametrize("times", [(10.0, 15.0, 2.0), (15.0, 10.0, 10.0), (15.0, 10.0, 0.0)])
def test_lease_times_that_cannot_work_are_refused(times: tuple[float, float, float]):
    with pytest.raises(ValueError, match="0 < retry < renew < lease"):
        LeaseTimes(*times)


class FakeClock:
    """A clock that sleeping moves, with nothing waited for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
