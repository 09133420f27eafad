"""A worker's stock engine over a small HTTP server in its place."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdcluster_worker.config.engine import EngineConfig, VllmConfig
from pdcluster_worker.config.worker import DiscoveryConfig, ModelConfig, TLSConfig, WorkerConfig
from pdcluster_worker.serving.engines.stock_child import StockChild, StockServer
from tests.ports import free_ports
from tests.worker.stock_engine.fake_vllm import METRICS, Call, FakeVllm, fake_vllm

SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 512,
    "dtype": "bfloat16",
}


def pages(**over: Any) -> dict[str, bytes]:
    output = {
        "/health": "",
        "/version": json.dumps({"version": "0.32.0"}),
        "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 99}]}),
        "/metrics": METRICS,
    }
    return {path: text.encode() for path, text in (output | over).items()}


def config(folder: Path, port: int, *command: str, size: int = 1, **more: Any) -> WorkerConfig:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    vllm = VllmConfig(port=port, kv_events_port=free_ports(size), command=command, **more)
    return WorkerConfig(
        cluster="c",
        revision="r",
        role="decode",
        pool="p",
        model=ModelConfig(name="m", path=str(folder)),
        discovery=DiscoveryConfig(endpoints=["127.0.0.1:1"]),
        tls=TLSConfig(ca="", certificate="", key=""),
        engine=EngineConfig(type="vllm", vllm=vllm, data_parallel_size=size),
    )


@asynccontextmanager
async def started(folder: Path, port: int, *command: str, **more: Any) -> AsyncIterator[StockChild]:
    async with started_by(config(folder, port, *command, **more)) as child:
        yield child


@asynccontextmanager
async def started_by(given: WorkerConfig) -> AsyncIterator[StockChild]:
    (child,) = StockServer(given).ranks
    await child.start()
    try:
        yield child
    finally:
        await child.stop()


async def warm_up(fake: FakeVllm, size: int = 1) -> list[Call]:
    """Answer the warm-up of ranks without log probabilities."""
    calls: list[Call] = []
    while len(calls) < 4 * size:
        call = await asyncio.wait_for(fake.calls.get(), 10)
        calls.append(call)
        is_scored = "prompt_logprobs" in params_of(call) or "logprobs" in params_of(call)
        await call.answer(b"{}", 400 if is_scored else 200)
    return calls


@asynccontextmanager
async def served(folder: Path, *command: str) -> AsyncIterator[tuple[FakeVllm, StockChild]]:
    """A child that is ready."""
    async with fake_vllm() as fake, started(folder, fake.port, *command) as child:
        fake.pages = pages()
        child.client.begin("float32")
        await warm_up(fake)
        await asyncio.wait_for(child.client.ready(), 10)
        yield fake, child


def params_of(call: Call) -> dict[str, Any]:
    params = call.body["sampling_params"]
    assert isinstance(params, dict)
    return params
