"""Limits of the model at a worker of several engines: those that hold for any of them."""

from msgspec.structs import replace

from pdcluster_worker.serving.backend import WorkerBackend
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from tests.worker.serving.doubles import FACTS, ScriptedEngine


async def test_limits_are_those_of_the_engine_with_the_shortest_length():
    short = replace(FACTS, max_model_len=96, length_note="lowered to 96")
    engines = [
        Engine(EngineClient(ScriptedEngine()), facts, f"127.0.0.1:{9100 + rank}", rank)
        for rank, facts in enumerate((FACTS, short))
    ]
    backend = WorkerBackend("m", Engines(*engines))

    backend.engines_are_ready()

    assert (backend.max_model_len, backend.length_note) == (96, "lowered to 96")
    assert (backend.vocab_size, backend.device, backend.scheduler) == (
        FACTS.vocab_size,
        FACTS.device,
        FACTS.scheduler,
    )
