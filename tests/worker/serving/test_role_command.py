"""A worker's role by command: wanted, withdrawn before it took effect, and refused."""

import asyncio

import pytest

from pdcluster_worker.serving.role_command import RoleCommand


class Commanded:
    """A worker that has drained once `drained` is set."""

    def __init__(self, pod_role, role):
        self.leaving: list[bool] = []
        self.drained = asyncio.Event()
        self.command = RoleCommand(pod_role, role, self.leaving.append)

    async def wait_drained(self):
        await self.drained.wait()


async def test_next_role_is_taken_once_nothing_of_the_present_one_is_left():
    worker = Commanded("prefill", "prefill")
    changing = asyncio.create_task(worker.command.changed(worker.wait_drained))

    worker.command.take("decode")
    await asyncio.sleep(0)
    assert (worker.leaving, changing.done()) == ([True], False)
    worker.drained.set()

    assert await changing == "decode"


async def test_end_of_the_command_is_the_role_of_the_pod():
    worker = Commanded("decode", "prefill")
    worker.drained.set()

    worker.command.take("prefill")
    worker.command.take(None)

    assert worker.leaving == [False, True]
    assert await worker.command.changed(worker.wait_drained) == "decode"


async def test_command_that_is_withdrawn_in_time_changes_nothing():
    worker = Commanded("decode", "decode")
    changing = asyncio.create_task(worker.command.changed(worker.wait_drained))
    worker.command.take("prefill")
    await asyncio.sleep(0)
    worker.command.take(None)

    worker.drained.set()
    for _ in range(3):
        await asyncio.sleep(0)

    assert (worker.leaving, changing.done()) == ([True, False], False)
    changing.cancel()


@pytest.mark.parametrize(
    ("pod_role", "commanded"),
    [("mixed", "decode"), ("router", "prefill"), ("decode", "mixed"), ("prefill", "")],
)
async def test_role_that_the_pod_cannot_have_is_logged_and_ignored(pod_role, commanded, caplog):
    worker = Commanded(pod_role, pod_role)

    worker.command.take(commanded)

    assert worker.leaving == [False]
    assert f"ignored role command role={commanded} pod_role={pod_role}" in caplog.text
