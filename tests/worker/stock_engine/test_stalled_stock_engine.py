"""A stock engine that has stalled and is idle: only progress of its own ends that."""

import asyncio

from pdcluster_worker.messages import engine as messages
from tests.worker.stock_engine.fake_vllm import METRICS
from tests.worker.stock_engine.rig import Rig, rigged

IDLE = METRICS.replace('running{engine="0",model_name="m"} 1.0', 'running{engine="0"} 0.0')


async def stall(rig: Rig) -> None:
    """It hangs in the first step of a request, which is aborted: its page says that it is idle."""
    rig.fake.pages["/metrics"] = IDLE.encode()
    await rig.page._poll()
    rig.reports.has_stalled = lambda: True


async def ping(rig: Rig) -> messages.Pong:
    rig.engine.take(messages.Ping())
    return await rig.said(messages.Pong)


async def test_an_engine_that_hangs_and_says_that_it_is_idle_does_not_recover() -> None:
    async with rigged() as rig:
        await stall(rig)
        for _ in range(3):
            assert (await ping(rig)) == messages.Pong(0, has_work=True)
            await rig.page._poll()

        probe = await rig.call()
        assert probe.body["sampling_params"]["max_tokens"] == 1
        await asyncio.sleep(0)
        assert rig.fake.calls.empty()  # one at a time


async def test_an_engine_that_answers_a_probe_recovers() -> None:
    async with rigged() as rig:
        await stall(rig)
        await ping(rig)
        await (await rig.call()).answer(b"{}")
        async with asyncio.timeout(10):
            while (await ping(rig)).num_steps == 0:
                await asyncio.sleep(0.01)


async def test_a_probe_that_is_refused_is_no_progress_and_is_sent_again() -> None:
    async with rigged() as rig:
        await stall(rig)
        await ping(rig)
        await (await rig.call()).answer(b"{}", 503)
        async with asyncio.timeout(10):
            while rig.fake.calls.empty():
                assert (await ping(rig)).num_steps == 0
                await asyncio.sleep(0.01)


async def test_an_engine_whose_numbers_change_recovers() -> None:
    async with rigged() as rig:
        await stall(rig)
        await rig.page._poll()
        rig.fake.pages["/metrics"] = IDLE.replace("350.0", "351.0").encode()
        await rig.page._poll()

        assert (await ping(rig)).num_steps == 1
