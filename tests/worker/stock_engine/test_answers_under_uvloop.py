"""uvloop, on which workers run, reads a connection before a task that was cancelled has ended."""

import asyncio
import gc
import time
import weakref

import uvloop

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineOutput
from tests.worker.stock_engine.fake_vllm import tokens_event
from tests.worker.stock_engine.rig import Rig, rigged, spec

QUIET_SECONDS = 0.2


async def outputs_meanwhile(rig: Rig) -> list[EngineOutput]:
    await asyncio.sleep(QUIET_SECONDS)
    return [rig.outputs.get_nowait() for _ in range(rig.outputs.qsize())]


def hold_the_loop() -> None:
    """Until what was sent is in the socket."""
    time.sleep(0.05)


def test_a_token_that_waits_in_the_socket_is_of_no_aborted_request_nor_of_a_later_one() -> None:
    async def test() -> None:
        async with rigged() as rig:
            rig.engine.take(messages.Submit(spec()))
            call = await rig.first_token()
            await call.send(tokens_event(8))
            hold_the_loop()
            rig.engine.take(messages.Abort("r"))
            rig.engine.take(messages.Submit(spec()))
            assert await outputs_meanwhile(rig) == []

    uvloop.run(test())


def test_a_fetch_that_is_given_up_as_its_first_token_comes_is_computed_here() -> None:
    async def test() -> None:
        async with rigged() as rig:
            call = await rig.fetch()
            await call.begin()
            await asyncio.sleep(0.05)
            await call.send(tokens_event(7))
            hold_the_loop()
            overdue, rig.reports.fetches.overdue = rig.reports.fetches.overdue, lambda now: ["r"]
            rig.engine._give_up()
            rig.reports.fetches.overdue = overdue
            (failed,) = await outputs_meanwhile(rig)
            assert isinstance(failed, messages.FetchFailed)
            rig.engine.take(messages.ReceiveFailed("r", rig.epoch, None))
            await asyncio.wait_for(rig.fake.calls.get(), 5)

    uvloop.run(test())


def test_an_answer_that_ended_holds_nothing() -> None:
    class Taken:
        def take(self, chunk: bytes) -> None:
            pass

    async def test() -> None:
        async with rigged() as rig:
            taken = Taken()
            gone = weakref.ref(taken)
            async with rig.http.request("GET", "/metrics") as answer:
                await answer.follow(taken.take)
            ended = weakref.ref(answer)
            del taken, answer
            await asyncio.sleep(0)
            assert gone() is None
            await asyncio.sleep(QUIET_SECONDS)  # its transport is closed by then
            assert ended() is None

    gc.disable()
    try:
        uvloop.run(test())
    finally:
        gc.enable()
