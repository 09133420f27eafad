"""Consequences of a stalled engine: for its requests, health, peers and its end."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Abort, EngineInput, EngineOutput, Ping, Pong
from pdcluster_worker.serving.backend import WorkerBackend
from pdcluster_worker.serving.engine_monitor import EngineMonitor
from pdcluster_worker.serving.engines.client import EngineStalledError
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.engines.stall_watch import StallWatch
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.fake_clock import FakeClock
from tests.worker.serving.doubles import FACTS, ScriptedEngine, client_of, stats, steps_of


class Scene:
    """A worker under a pulse whose clock the test moves; its engine answers pings
    while `answers`.
    """

    def __init__(self, worker: WorkerContext, engine: ScriptedEngine) -> None:
        self.worker, self.engine = worker, engine
        self.clock = FakeClock()
        self.answers = True
        self.is_leaving = False
        worker.policy = type(worker.policy)(stall_seconds=4)
        worker.engines.first.stall_watch = StallWatch(self.clock, 0.0)
        engine.answer = self._answer
        self.told: list[tuple[bool, str | None]] = []
        self.killed: list[str] = []
        self.monitor = EngineMonitor(
            worker,
            self._on_change,
            lambda: self.is_leaving,
            lambda _, reason: self.killed.append(reason),
        )

    def _on_change(self, _: Engine, is_stalled: bool) -> None:
        self.told.append((is_stalled, client_of(self.worker).stalled))

    def _answer(self, message: EngineInput) -> Sequence[EngineOutput]:
        return [Pong(0, has_work=False)] if isinstance(message, Ping) and self.answers else []

    async def poll(self, count: int = 1) -> list[bool]:
        """One a second, with time for an answer before each; whether the engine is lost."""
        text = []
        for _ in range(count):
            self.clock.advance(1.0)
            text.append(self.monitor.poll(self.worker.engines.first))
            for _ in range(10):
                await asyncio.sleep(0)
        return text

    @property
    def gauge(self) -> float:
        return self.worker.metrics.engine_stalled.collect()[0].samples[0].value


@pytest.fixture
def scene(worker: WorkerContext, engine: ScriptedEngine) -> Scene:
    return Scene(worker, engine)


async def test_pulse_of_an_engine_that_answers_changes_nothing(scene):
    assert not any(await scene.poll(30))

    assert (client_of(scene.worker).stalled, scene.worker.load().state, scene.gauge) == (
        None,
        "ready",
        0,
    )
    assert len([m for m in scene.engine.inputs if isinstance(m, Ping)]) == 30


async def test_pulse_pings_are_no_messages_that_statistics_know_of(scene):
    scene.engine.say(stats(8, num_inputs=0))
    await scene.poll(3)

    # else a drain would wait for a report that an idle engine does not make
    assert client_of(scene.worker).is_reported


async def test_pulse_of_a_stalled_engine_fails_health_and_leaves_the_choice(scene):
    backend = WorkerBackend("m", scene.worker.engines)
    scene.answers = False
    await scene.poll(5)

    assert backend.alive() is not None
    assert "has stalled: no step and no answer for 5.0 s (qos.stallSeconds is 4" in backend.alive()
    assert backend.ready() == backend.alive()
    assert backend.draining()  # so answers close their connections
    assert (scene.worker.load().state, scene.worker.takes_new, scene.gauge) == ("stalled", False, 1)


async def test_pulse_tells_peers_of_a_stall_at_once(scene):
    scene.answers = False
    await scene.poll(4)
    async with aclosing(scene.worker.reports()) as reports, asyncio.timeout(5):
        assert (await anext(reports)).load.state == "ready"
        tracking = asyncio.create_task(anext(reports))
        await scene.poll(1)
        assert (await tracking).load.state == "stalled"


async def test_pulse_fails_requests_of_a_stalled_engine_and_refuses_new_ones(scene):
    client = client_of(scene.worker)
    mailbox = client.open("r")
    scene.answers = False
    await scene.poll(5)

    with pytest.raises(EngineStalledError, match="has stalled") as caught:
        await mailbox.token()
    assert (caught.value.status, caught.value.code) == (503, "engine_stalled")
    with pytest.raises(EngineStalledError):
        client.open("other")
    assert isinstance(scene.worker.refusal(), EngineStalledError)
    client.close(mailbox)
    await scene.poll()
    assert scene.engine.inputs[-1] == Abort("r")  # an engine that recovers must not continue it


async def test_pulse_of_an_engine_that_makes_progress_again_serves_as_before(scene):
    scene.answers = False
    await scene.poll(6)
    scene.answers = True
    scene.engine.say(Pong(0, has_work=False))
    await scene.poll(2)

    assert (client_of(scene.worker).stalled, scene.worker.load().state, scene.gauge) == (
        None,
        "ready",
        0,
    )
    client_of(scene.worker).open("r")
    assert scene.told == [(True, None), (False, None)]  # of a stall before any request fails


async def test_pulse_of_an_engine_that_is_to_be_killed_grants_nothing_again(scene):
    scene.answers = False
    await scene.poll(6)
    client_of(scene.worker).give_up("another rank of it is lost")
    scene.answers = True
    scene.engine.say(Pong(0, has_work=False))
    await scene.poll(2)

    assert (client_of(scene.worker).stalled is None, scene.told[1:]) == (False, [])


async def test_pulse_says_when_the_engine_is_lost(scene):
    scene.answers = False

    assert await scene.poll(9) == [*[False] * 8, True]
    scene.monitor.start(scene.worker.engines.first)
    await asyncio.sleep(0)
    assert [reason.endswith("longest step): killed") for reason in scene.killed] == [True]


async def test_pulse_of_a_worker_that_is_to_end_waits_for_no_stalled_engine(scene):
    scene.answers, scene.is_leaving = False, True

    assert await scene.poll(5) == [*[False] * 4, True]


async def test_pulse_margin_is_that_of_the_policy_in_force(scene):
    scene.answers = False
    scene.worker.policy = type(scene.worker.policy)(stall_seconds=100)

    assert not any(await scene.poll(90))
    assert client_of(scene.worker).stalled is None


async def test_worker_load_tells_progress_and_the_longest_step(worker, engine):
    engine.say(steps_of(("prefill", 1.5), num_steps=3, bytes_sent=64))
    while client_of(worker).stats is None:
        await asyncio.sleep(0)

    assert (worker.load().progress, worker.load().longest_step_seconds) == (67, 1.5)


async def test_worker_knows_the_steps_of_the_warm_up(worker):
    facts = replace(FACTS, longest_step_seconds=7.5)
    other = WorkerContext(
        "decode",
        Engines(Engine(client_of(worker), facts, "127.0.0.1:9100")),
        type(worker.metrics)(),
        worker.policy,
    )

    assert other.engines.first.stall_watch.longest_step_seconds == 7.5


async def test_refusal_of_a_draining_worker_stays_that_of_a_drain(scene):
    scene.answers = False
    await scene.poll(5)
    scene.worker.announce("draining")

    assert isinstance(scene.worker.refusal(), RequestError)
    assert scene.worker.refusal().code == "draining"
