"""The engine processes of a worker: which death ends it, which engine comes back, and when."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest
from msgspec.structs import replace

from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine import Begin
from pdcluster_worker.serving.engines import group as engine_group
from pdcluster_worker.serving.engines.client import EngineClient, EngineDiedError
from pdcluster_worker.serving.engines.engines import Engine
from pdcluster_worker.serving.engines.group import Child, EngineGroup
from tests.worker.serving.doubles import FACTS, ScriptedEngine, until


class PlayedChild(Child):
    """A process that loads and ends when a test says so."""

    def __init__(self, rank: int) -> None:
        self.script = ScriptedEngine()
        super().__init__(rank, EngineClient(self.script))
        self.is_stopped = False

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.client.run())]

    def _kill(self) -> None: ...

    async def stop(self) -> None:
        self.is_stopped = True
        await super().stop()

    def load(self, weights: str = "w") -> None:
        self.script.say(replace(FACTS, engine_id=f"engine-{self.rank}-{id(self)}", weights=weights))

    def end(self, status: int = -9) -> None:
        self.client.fail(f"its process ended with status {status}")
        self.exit_status.set_result(status)


class Scene:
    """A group of played processes.  children: all that were made, in order."""

    def __init__(self, size: int) -> None:
        self.children: list[PlayedChild] = []
        self.started: list[int] = []
        self.ended: list[int] = []
        self.pauses: list[float] = []
        self.group = EngineGroup(size, self._new_child, lambda port: f"127.0.0.1:{port}")
        self.group.on_start = lambda engine, _: self.started.append(engine.rank)
        self.group.on_end = lambda engine: self.ended.append(engine.rank)

    def _new_child(self, rank: int) -> PlayedChild:
        self.children.append(PlayedChild(rank))
        return self.children[-1]

    async def load(self) -> None:
        await self.group.start()
        self.group.begin("float32")
        for child in self.children:
            child.load()
        await self.group.ready()

    async def child(self, number: int) -> PlayedChild:
        """The process that was made as that one; waits for it."""
        await until(lambda: len(self.children) > number)
        return self.children[number]

    @property
    def serving(self) -> list[int]:
        return [engine.rank for engine in self.group.engines if engine.serves]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """A group of two; pauses take no time."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    def pause(seconds: float) -> Awaitable[None]:
        if seconds:
            pauses.append(seconds)
        return sleep(0)

    monkeypatch.setattr(engine_group.asyncio, "sleep", pause)
    scene = Scene(2)
    scene.pauses = pauses
    yield scene
    await scene.group.stop()


async def test_engine_that_dies_is_started_again_while_the_other_serves(scene):
    await scene.load()
    first = scene.group.engines.first
    scene.children[0].end()
    again = await scene.child(2)
    assert (scene.serving, scene.ended, scene.group.ended.done()) == ([1], [0], False)

    again.load()
    await until(lambda: scene.serving == [0, 1])
    assert scene.group.engines.first.facts.engine_id != first.facts.engine_id
    assert (again.rank, scene.started, scene.children[0].is_stopped) == (0, [0], True)


async def test_death_of_the_last_engine_ends_the_worker(scene):
    await scene.load()
    scene.children[0].end()
    await scene.child(2)  # it loads, and does not serve yet
    scene.children[1].end(status=1)

    assert await scene.group.ended is scene.children[1]
    assert scene.group.failed is scene.children[1]


async def test_death_of_any_engine_while_they_load_ends_the_worker(scene):
    await scene.group.start()
    scene.group.begin("float32")
    scene.children[0].load()
    scene.children[1].end(status=2)

    with pytest.raises(EngineDiedError, match="status 2"):
        await scene.group.ready()
    assert scene.group.failed is scene.children[1]


async def test_death_of_an_engine_before_it_loads_ends_the_worker(scene):
    await scene.group.start()
    scene.children[0].end(status=2)

    assert await scene.group.ended is scene.children[0]
    scene.group.begin("float32")  # the other one is still there
    with pytest.raises(EngineDiedError, match="status 2"):
        await scene.group.ready()


async def test_every_process_is_reported_and_loads_those_that_come_again_too(scene):
    told: list[int] = []
    scene.group.report_children(lambda child: told.append(child.rank))
    await scene.load()
    scene.children[0].end()
    again = await scene.child(2)
    again.load()
    await until(lambda: scene.serving == [0, 1])

    assert told == [0, 1, 0]
    assert all(child.script.inputs[0] == Begin("float32") for child in scene.children)


async def test_engine_that_does_not_stay_is_started_at_longer_and_longer_intervals(scene):
    await scene.load()
    for number in range(6):
        (await scene.child(number + 1 if number else 0)).end()
    await scene.child(7)

    assert scene.pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert scene.serving == [1]
    assert "engine 0 is lost" in (scene.group.engines.shortfall or "")


async def test_engine_that_comes_back_with_another_model_does_not_serve(scene):
    await scene.load()
    scene.children[0].end()
    (await scene.child(2)).load(weights="other")
    await scene.child(3)

    assert scene.serving == [1]
    assert "different models" in (scene.group.engines.shortfall or "")


async def test_engines_with_different_models_do_not_begin(scene):
    await scene.group.start()
    scene.group.begin("float32")
    scene.children[0].load()
    scene.children[1].load(weights="other")

    with pytest.raises(ModelError, match="different models"):
        await scene.group.ready()


async def test_no_engine_is_started_again_when_the_worker_leaves(scene):
    await scene.load()
    scene.group.leave()
    scene.children[0].end()
    await until(lambda: scene.serving == [1] and bool(scene.pauses))
    for _ in range(5):
        await asyncio.sleep(0)

    assert len(scene.children) == 2


async def test_kill_of_an_engine_that_was_replaced_is_for_nothing(scene):
    """The watch of the old one may be a moment late."""
    await scene.load()
    old: Engine = scene.group.engines.first
    scene.children[0].end()
    (await scene.child(2)).load()
    await until(lambda: scene.serving == [0, 1])
    scene.group.kill(old, "it has stalled")

    assert scene.serving == [0, 1]


async def test_headless_engine_that_is_gone_is_lost_and_forgotten_after_a_while(scene, monkeypatch):
    forgotten: list[int] = []
    scene.group.on_forget = lambda engine: forgotten.append(engine.rank)
    await scene.load()
    monkeypatch.setattr(engine_group, "FORGET_SECONDS", 0.05)
    await leave(scene, PlayedChild(2))
    assert "engine 2 is lost" in (scene.group.engines.shortfall or "")
    assert [record.state for record in scene.group.engines.records()] == ["ready", "ready", "lost"]

    await until(lambda: forgotten == [2])
    assert scene.group.engines.shortfall is None
    assert [record.state for record in scene.group.engines.records()] == ["ready", "ready"]


async def test_headless_engine_that_comes_back_is_not_forgotten(scene):
    await scene.load()
    await leave(scene, PlayedChild(2))
    (gone,) = (engine for engine, _ in scene.group.engines.lost.values())
    again = PlayedChild(2)
    adopting = asyncio.create_task(scene.group.adopt(again, "127.0.0.1"))
    again.load()
    await until(lambda: scene.serving == [0, 1, 2])

    assert not scene.group.engines.forget(gone)
    assert scene.serving == [0, 1, 2]
    again.end()
    await adopting


async def leave(scene: Scene, child: PlayedChild) -> None:
    adopting = asyncio.create_task(scene.group.adopt(child, "127.0.0.1"))
    child.load()
    await until(lambda: child.rank in scene.serving)
    child.end()
    await adopting
    await child.stop()
