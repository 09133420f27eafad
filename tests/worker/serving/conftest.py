"""A worker whose engine is a script; see doubles.py for what is played and what is real."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import FACTS, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def worker(engine: ScriptedEngine) -> AsyncIterator[WorkerContext]:
    client = EngineClient(engine)
    task = asyncio.create_task(client.run())
    worker = WorkerContext(
        "decode", Engines(Engine(client, FACTS, "127.0.0.1:9100")), Metrics(), PolicyConfig()
    )
    worker.state = "ready"
    yield worker
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
