"""Credits of a prefill worker follow its engines: as many as they take, none while no engine makes
progress or the worker drains.
"""

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import PrefillQueueSpec
from pdcluster_worker.config.worker import (
    Identity,
    TLSConfig,
)
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from tests.worker.serving.doubles import FACTS, ScriptedEngine, config_of

BUDGET = 100  # of a step; two are promised ahead for each engine


class Scene:
    """A prefill worker of two engines that a decode worker asks for credits; nothing listens and
    etcd is away.
    """

    def __init__(self, tls: TLSConfig) -> None:
        engine = {"max_batched_tokens": BUDGET, "max_sequences": 8, "data_parallel_size": 2}
        config = config_of(tls, "prefill", **engine)
        self.engines = Engines(*(self.engine(rank) for rank in range(2)))
        self.worker = WorkerContext("prefill", self.engines, Metrics(), PolicyConfig())
        self.node = WorkerRuntime(
            config,
            Identity("pod", "default", "127.0.0.1"),
            Credentials(tls),
            self.worker,
            self._unacked,
        )
        # As `join` does, without ports and without a session with etcd.
        self.node._record = self.node._make_record(1, 2)
        self.worker.state = "ready"
        self.worker.on_engines = self.node._on_engines
        self.credit_server = self.node._service.credit_server
        self.answers = self.credit_server.open("decode-engine")

    def engine(self, rank: int) -> Engine:
        return Engine(
            EngineClient(ScriptedEngine()),
            replace(FACTS, engine_id=f"engine-{rank}"),
            f"127.0.0.1:{9100 + rank}",
            rank,
        )

    def claim(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.credit_server.claim("decode-engine", request_id, BUDGET, 0)

    def granted(self) -> list[str]:
        answers = [self.answers.get_nowait() for _ in range(self.answers.qsize())]
        return [request_id for request_id, granted in answers if granted]

    async def _unacked(self) -> frozenset[str]:
        return frozenset()


@pytest.fixture
async def scene(tls: TLSConfig) -> Scene:
    return Scene(tls)


async def test_two_steps_are_promised_for_each_engine_that_lives(scene):
    scene.claim(*"abcdef")
    assert scene.granted() == ["a", "b", "c", "d"]

    first = scene.engines.first
    first.client.fail("it ended")
    scene.engines.remove(first, "it ended")
    scene.worker.engines_changed()
    for request_id in "ab":
        scene.credit_server.start("decode-engine", request_id)
        scene.credit_server.finish("decode-engine", request_id)
    assert scene.granted() == []  # what is out is as much as one engine takes

    scene.engines.add(scene.engine(0))
    scene.worker.engines_changed()
    assert scene.granted() == ["e", "f"]


async def test_nothing_is_promised_while_no_engine_makes_progress(scene):
    first, second = scene.engines
    first.client.stall("it has stalled")
    scene.node.on_stall(first, True)
    scene.claim("a")
    assert scene.granted() == ["a"]  # the other one serves

    second.client.stall("it has stalled")
    scene.node.on_stall(second, True)
    scene.claim("b")
    assert scene.granted() == []

    second.client.recover()
    scene.node.on_stall(second, False)
    assert scene.granted() == ["b"]


async def test_engine_that_comes_back_promises_nothing_for_a_worker_that_drains(scene):
    scene.node._announce("draining")
    scene.worker.engines_changed()
    scene.claim("a")
    assert scene.granted() == []

    scene.node._announce("ready")
    assert scene.granted() == ["a"]


async def test_engine_that_stalls_as_another_dies_leaves_no_promise(scene):
    first, second = scene.engines
    second.client.stall("it has stalled")
    scene.node.on_stall(second, True)
    first.client.fail("it ended")
    scene.engines.remove(first, "it ended")
    scene.worker.engines_changed()
    scene.claim("a")
    assert scene.granted() == []


async def test_another_policy_of_the_prefill_queue_holds_at_once(scene):
    """Ten tokens each, so that they fill no batch: with a window the eighth lets all eight in."""
    value = scene.worker.metrics.registry.get_sample_value
    scene.node.set_policy(
        PolicyConfig(
            prefill_queue=PrefillQueueSpec(mode="throughputFirst", max_window_milliseconds=1000)
        )
    )
    scene.credit_server.claim("decode-engine", "first", 10, 0)
    assert scene.granted() == ["first"]  # alone, on an idle worker
    for request_id in "abcdefg":
        scene.credit_server.claim("decode-engine", request_id, 10, 0)
    assert scene.granted() == []
    assert (value("pdcluster_credit_wants"), value("pdcluster_credit_tokens")) == (7, 10)

    scene.credit_server.claim("decode-engine", "h", 10, 0)
    assert scene.granted() == ["h", *"abcdefg"]
    assert (value("pdcluster_credit_wants"), value("pdcluster_credit_tokens")) == (0, 90)
    sums = (
        value("pdcluster_prefill_group_requests_count"),
        value("pdcluster_prefill_group_requests_sum"),
    )
    assert sums == (2, 9)

    scene.credit_server.claim("decode-engine", "late", 10, 0)
    assert scene.granted() == []
    scene.node.set_policy(PolicyConfig())
    assert scene.granted() == ["late"]
    assert scene.worker.load().credit_tokens == 0  # its engine has not reported yet
    assert scene.worker.promised_tokens() == 100
