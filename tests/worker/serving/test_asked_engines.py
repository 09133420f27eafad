"""The front end that an ingress asks: of its own engine, else of a decode worker."""

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.serving.peer_handler import PeerRequestHandler
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.stock_engine.front_end import StockFrontEnd
from pdcluster_worker.stock_engine.http import StockClient
from tests.ports import free_port
from tests.worker.stock_engine.fake_vllm import fake_vllm


def front_end_at(port: int) -> StockFrontEnd:
    return StockFrontEnd(StockClient(port), lambda _: nullcontext(lambda _: None))


class PlayedPeer:
    def __init__(self, name: str, *, ready: bool = True, load: int = 0, ok: bool = True) -> None:
        self.ready, self.load, self._name, self._ok = (
            ready,
            SimpleNamespace(num_requests=load),
            name,
            ok,
        )

    async def ask(self, path: str, body: bytes) -> bytes:
        if not self._ok:
            raise PeerError(f"{self._name} is lost")
        return self._name.encode()


def runtime_of(front_end: StockFrontEnd | None, *peers: PlayedPeer) -> Any:
    directory = SimpleNamespace(known_decodes=lambda: list(peers))
    worker = SimpleNamespace(front_end=front_end)
    found: Any = SimpleNamespace(worker=worker, _directory=directory)
    found._ask_each = partial(WorkerRuntime._ask_each, found)
    return found


async def ask(runtime: Any) -> bytes:
    return await WorkerRuntime.ask(cast(WorkerRuntime, runtime), "/detokenize", b"{}")


async def test_a_worker_asks_its_own_engine() -> None:
    async with fake_vllm() as fake:
        asking = asyncio.create_task(ask(runtime_of(front_end_at(fake.port), PlayedPeer("a"))))
        await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"own")
        assert await asking == b"own"


async def test_one_whose_engine_is_gone_asks_the_least_loaded_peer_that_is_there() -> None:
    gone = front_end_at(free_port())
    peers = PlayedPeer("lost", ok=False), PlayedPeer("busy", load=5), PlayedPeer("idle", load=1)

    assert await ask(runtime_of(gone, *peers)) == b"idle"
    assert await ask(runtime_of(None, PlayedPeer("draining", ready=False))) == b"draining"


async def test_without_an_engine_anywhere_the_client_gets_a_503_with_retry_after() -> None:
    with pytest.raises(RequestError, match=r"no engine renders prompts .*\(lost is lost\)") as e:
        await ask(runtime_of(None, PlayedPeer("lost", ok=False)))

    assert (e.value.status, e.value.code, e.value.retry_after_seconds) == (503, "no_front_end", 1)


async def test_a_peer_asks_for_the_front_end_alone() -> None:
    async with fake_vllm() as fake:
        worker: Any = SimpleNamespace(front_end=front_end_at(fake.port))
        hello = cast(Hello, SimpleNamespace(engine_id="e"))
        handler = PeerRequestHandler(worker, hello, cast(Any, None), None)
        with pytest.raises(RequestError, match="is not asked for /sleep here"):
            await handler.ask("/sleep", b"{}")
        asking = asyncio.create_task(handler.ask("/detokenize", b"{}"))
        (await asyncio.wait_for(fake.calls.get(), 10)).cut()
        with pytest.raises(PeerError, match="closed the connection"):
            await asking
        worker.front_end = None
        with pytest.raises(RequestError, match="is not asked for"):
            await handler.ask("/detokenize", b"{}")
