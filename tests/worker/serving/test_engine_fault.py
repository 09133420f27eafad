"""Reasons to restart the container of a stock engine."""

from pdcluster_worker.serving.backend import WorkerBackend, restart_reason
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from tests.worker.serving.doubles import FACTS, ScriptedEngine


def backend_of(*engines: Engine) -> WorkerBackend:
    return WorkerBackend("m", Engines(*engines), may_compile=True)


async def test_an_engine_may_load_for_its_time_and_no_longer():
    now = [100.0]
    fault = restart_reason(backend_of(), lambda: now[0], 7200)

    now[0] += 7200 - 1
    assert fault() is None
    now[0] += 1
    assert fault() == "the engine is not ready after 7200 s"


async def test_an_engine_that_stalls_is_restarted_once_it_is_given_up():
    client = EngineClient(ScriptedEngine())
    backend = backend_of(Engine(client, FACTS, "127.0.0.1:9100", 0))
    backend.engines_are_ready()
    fault = restart_reason(backend, lambda: 0.0, 60)

    assert fault() is None
    client.stall("no step for 40 s")  # it may compile
    assert fault() is None
    assert "no step for 40 s" in (backend.ready() or "")
    client.is_given_up = True
    assert "no step for 40 s" in (fault() or "")


async def test_ranks_that_serve_finish_before_a_container_restarts():
    clients = [EngineClient(ScriptedEngine()) for _ in range(2)]
    backend = backend_of(*(Engine(each, FACTS, "h:1", rank) for rank, each in enumerate(clients)))
    backend.engines_are_ready()
    fault = restart_reason(backend, lambda: 0.0, 60)

    clients[1].give_up("no step for 40 s")
    assert fault() is None


async def test_readiness_names_what_the_engine_waits_for():
    backend = backend_of()
    backend.wait("the engine answers /health, and warms up")

    assert backend.ready() == "the engine answers /health, and warms up"
