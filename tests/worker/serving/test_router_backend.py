"""A router's requests while decode workers come and go, and the limits that it takes from them."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.serving import backend as backend_module
from pdcluster_worker.serving.backend import MAX_LOST, RouterBackend
from pdcluster_worker.serving.engines.engines import Engines
from pdcluster_worker.serving.worker_context import RouterInfo, WorkerContext
from pdcluster_worker.serving.worker_runtime import NO_FRONT_END, WorkerRuntime

SPEC = RequestSpec("r", [1, 2, 3], SamplingParams(max_tokens=2, seed=1))


class PlayedNode:
    """A node whose decode workers a test sets; its ingress answers one token."""

    def __init__(self, policy: PolicyConfig) -> None:
        self.worker = WorkerContext(
            "router",
            Engines(),
            Metrics(),
            policy,
            engineless=RouterInfo("w", 16),
            absence=self.absence,
        )
        self.worker.state = "ready"
        self.ingress = SimpleNamespace(generate=self._generate)
        self.on_peers = lambda: None
        self.peers: list[Any] = []
        self.draining = False
        self.errors: list[RequestError] = []  # of the next tries
        self.loses = False  # with an error the worker is gone
        self.tries: list[float] = []

    def decodes(self) -> list[Any]:
        return self.peers

    def absence(self) -> str:
        return "none is registered"

    def problem(self) -> None:
        return None

    async def ask(self, path: str, body: bytes) -> bytes:
        if not self.peers and not self.draining:
            raise RequestError("no engine", status=503, code=NO_FRONT_END)
        return body

    def become(self, *limits: tuple[int, int]) -> None:
        self.peers = [
            SimpleNamespace(hello=SimpleNamespace(max_model_len=length, vocab_size=size))
            for length, size in limits
        ]
        self.on_peers()

    async def _generate(
        self, specs: list[RequestSpec], *_: object
    ) -> AsyncGenerator[Generated, None]:
        self.tries.append(asyncio.get_running_loop().time())
        if self.errors:
            if self.loses:
                self.become()
            raise self.errors.pop(0)
        yield Generated(Token(specs[0].request_id, 7, finish_reason="length"))


def make(
    wait_seconds: float = 0.0, max_queued_requests: int = 1024
) -> tuple[PlayedNode, RouterBackend]:
    policy = PolicyConfig(
        admission=AdmissionSpec(
            worker_wait_seconds=wait_seconds, max_queued_requests=max_queued_requests
        )
    )
    runtime, backend = PlayedNode(policy), RouterBackend("chat", 2048, 100)
    backend.serve(cast(WorkerRuntime, runtime))
    return runtime, backend


async def collect(backend: RouterBackend) -> list[int]:
    return [generated.token.token_id async for generated in backend.generate([SPEC], "auto")]


async def test_router_without_decode_workers_is_ready_and_refuses_with_the_reason():
    _, backend = make()
    with pytest.raises(
        RequestError,
        match=r"no decode worker takes requests now \(none is registered\): retry later",
    ) as caught:
        await collect(backend)

    assert (caught.value.status, caught.value.code, caught.value.retry_after_seconds) == (
        503,
        "no_decode_worker",
        2,
    )
    assert (backend.ready(), backend.shortfall()) == (
        None,
        "no decode worker takes requests: none is registered",
    )


async def test_router_request_waits_for_a_decode_worker():
    runtime, backend = make(wait_seconds=600.0)
    waiting = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)
    assert runtime.worker.active == 1  # a drain waits for it

    runtime.become((1024, 90))

    assert (await waiting, runtime.worker.active, backend.shortfall()) == ([7], 0, None)


def held(runtime: PlayedNode) -> float | None:
    return runtime.worker.metrics.registry.get_sample_value("pdcluster_held_requests")


async def test_router_counts_the_requests_that_it_holds_and_forgets_clients_that_leave():
    runtime, backend = make(wait_seconds=600.0)
    answer = asyncio.create_task(collect(backend))
    tokens = asyncio.create_task(backend.ask("/detokenize", b"x"))
    await asyncio.sleep(0)
    assert held(runtime) == 2

    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert (held(runtime), runtime.worker.active) == (1, 1)

    runtime.become((1024, 90))
    await tokens
    assert held(runtime) == 0


async def test_router_holds_so_many_tokens_at_most():
    runtime, backend = make(wait_seconds=600.0)
    runtime.worker.policy = PolicyConfig(
        admission=AdmissionSpec(worker_wait_seconds=600.0, max_queued_tokens=5)
    )
    first = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)

    with pytest.raises(RequestError, match="prompt tokens wait") as caught:
        await collect(backend)

    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert caught.value.retry_after_seconds is not None
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_router_asks_for_tokens_once_a_decode_worker_is_there():
    runtime, backend = make(wait_seconds=600.0)
    waiting = asyncio.create_task(backend.ask("/detokenize", b"x"))
    await asyncio.sleep(0)
    assert not waiting.done()

    runtime.become((1024, 90))

    assert await waiting == b"x"


async def test_router_asks_workers_that_drain_for_open_answers():
    runtime, backend = make(wait_seconds=600.0)
    runtime.draining = True

    assert await backend.ask("/detokenize", b"x") == b"x"


async def test_router_wait_is_bounded_in_time_and_in_requests():
    _, backend = make(wait_seconds=0.01, max_queued_requests=1)
    first, second = await asyncio.gather(collect(backend), collect(backend), return_exceptions=True)

    assert isinstance(first, RequestError)
    assert isinstance(second, RequestError)
    assert (first.code, second.code) == ("no_decode_worker", "queue_full")


async def test_router_takes_the_lowest_limits_and_keeps_them_while_no_worker_is_there():
    runtime, backend = make()
    assert (backend.max_model_len, backend.vocab_size) == (2048, 100)

    runtime.become((1024, 100), (512, 99))
    runtime.become()

    assert (backend.max_model_len, backend.vocab_size) == (512, 99)


async def test_router_that_is_not_registered_yet_refuses():
    backend = RouterBackend("chat", 2048, 100)

    with pytest.raises(RequestError, match="this router is not ready: not registered in etcd yet"):
        backend.generate([SPEC], "auto")


def refused(code: str) -> RequestError:
    return RequestError("no", status=503, code=code, retry_after_seconds=1)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "MAX_PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("is_first", [True, False], ids=["it woke it", "it came later"])
async def test_request_whose_worker_dies_before_its_first_token_waits_for_the_next(
    is_first: bool,
) -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.errors, runtime.loses = [refused("no_decode_worker")], True
    if not is_first:
        runtime.become((1024, 90))
    answer = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)
    if is_first:
        runtime.become((1024, 90))
    while held(runtime) != 1 or not runtime.tries:
        await asyncio.sleep(0)
    assert runtime.worker.active == 1

    runtime.become((1024, 90))

    assert (await answer, len(runtime.tries), held(runtime)) == ([7], 2, 0)


async def test_held_request_that_finds_a_full_worker_is_held_on() -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.errors = [refused("queue_full") for _ in range(10)]
    answer = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)
    runtime.become((1024, 90))

    assert (await answer, len(runtime.tries)) == ([7], 11)
    assert all(now > last for last, now in pairwise(runtime.tries)), "tries without a pause"


@pytest.mark.parametrize("code", ["draining", "engine_stalled", "duplicate_request"])
async def test_held_request_is_held_on_while_its_last_try_may_still_run(code: str) -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.errors = [refused("no_decode_worker"), refused(code)]
    answer = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)
    runtime.become((1024, 90))

    assert (await answer, len(runtime.tries)) == ([7], 3)


async def test_held_request_is_refused_as_it_was_last_when_its_time_is_over() -> None:
    runtime, backend = make(wait_seconds=0.05)
    runtime.errors = [refused("queue_full") for _ in range(1000)]
    answer = asyncio.create_task(collect(backend))
    await asyncio.sleep(0)
    runtime.become((1024, 90))

    with pytest.raises(RequestError) as caught:
        await answer
    assert caught.value.code == "queue_full"


@pytest.mark.parametrize("code", ["queue_full", "prompt_limit"])
async def test_request_that_was_not_held_is_refused_at_once(code: str) -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.become((1024, 90))
    runtime.errors = [refused(code)]
    with pytest.raises(RequestError) as caught:
        await collect(backend)
    assert (caught.value.code, len(runtime.tries)) == (code, 1)


async def test_request_that_ends_its_workers_ends_few() -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.errors = [refused("no_decode_worker") for _ in range(10)]
    runtime.become((1024, 90))
    with pytest.raises(RequestError):
        await collect(backend)
    assert len(runtime.tries) == 1 + MAX_LOST


async def test_router_that_drains_holds_nothing_again() -> None:
    runtime, backend = make(wait_seconds=600.0)
    runtime.become((1024, 90))
    runtime.worker.state = "draining"
    runtime.errors = [refused("no_decode_worker")]
    with pytest.raises(RequestError):
        await collect(backend)
