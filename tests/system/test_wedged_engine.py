"""A stopped engine process (SIGSTOP) whose server process lives: detected, avoided,
and restarted.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import psutil
import pytest

from pdctl.local.processes import Launch, Supervisor
from tests.system.client import answer_of, body
from tests.system.cluster import Cluster, Pair
from tests.system.prompts import Prompts
from tests.system.waiting import wait_for
from tests.system.worker_process import READY_SECONDS, SETTLE_SECONDS, WorkerProcess

STALL_SECONDS = 5
SHORT = {"stallSeconds": STALL_SECONDS}
LAST_WORDS = "the engine of this worker stopped: no step and no answer for "


@pytest.fixture
def impatient(pair: Pair) -> Iterator[Pair]:
    """The pair with a short margin, taken by the workers that run."""
    for worker in pair.cluster.workers.values():
        worker.take_policy(SHORT)
    yield pair
    pair.cluster.heal()
    for worker in pair.cluster.workers.values():
        worker.take_policy({})


@pytest.fixture
def second(impatient: Pair) -> Iterator[WorkerProcess]:
    cluster = impatient.cluster
    worker = cluster.add_worker("decode", "pair-decode-1", start=False)
    worker.write_policy(SHORT)
    worker.start()
    try:
        cluster.wait_ready()
        for decode in (impatient.decode, worker):
            decode.wait_for(
                lambda decode=decode: decode.num_decode_peers() == 1,
                "both decode workers know each other",
            )
        yield worker
    finally:
        worker.close()
        del cluster.workers[worker.name]
        cluster.heal()
        impatient.decode.wait_for(
            lambda: impatient.decode.num_decode_peers() == 0, "the second one is forgotten"
        )


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_stopped_prefill_engine_costs_no_auto_request(impatient, pool, prompts, reference):
    decode, prefill, prompt = impatient.decode, impatient.prefill, prompts(300)
    before, engine_pid = decode.metrics(), prefill.engine_pid
    with prefill.engine_stopped():
        granted = pool.submit(decode.client.complete, prompt, "auto")
        decode.wait_for(
            lambda: decode.blocks()["receiving"] > 0, "the first request has a credit and blocks"
        )
        waiting = pool.submit(decode.client.post, body(prompts(300), "remote"))
        decode.wait_for(
            lambda: decode.metrics().value("prefill_queue_requests") == 1,
            "the second one waits for a credit",
        )

        _check_told(prefill)
        answer, refused = granted.result(), waiting.result()
        assert answer.prefill == "local"
        reference.check(prompt, answer.tokens)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_prefill_worker")
        decode.wait_growth(before, "remote_prefill_total", 1, outcome="stalled")
        assert _status(decode, "/ready") == _status(decode, "/health") == httpx.codes.OK
        _check_ended(impatient.cluster, prefill, engine_pid)

    prefill.restart()
    impatient.cluster.wait_connected()
    assert decode.client.complete(prompts(300), "auto").prefill == "remote"


def test_forced_prefill_at_a_stopped_engine_is_a_clear_error(impatient, prompts):
    with impatient.prefill.engine_stopped():
        reply = impatient.decode.client.post(body(prompts(300), "remote"))

    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "prefill_failed")
    assert "has stalled" in reply.json()["error"]["message"]


def test_stopped_engine_of_the_only_decode_worker_is_reported_to_its_clients(
    impatient, pool, prompts
):
    decode, engine_pid = impatient.decode, impatient.decode.engine_pid
    with decode.client.stream(prompts(20), "local", max_tokens=1900) as stream:
        stream.read_tokens(2)
        with decode.engine_stopped():
            silent = pool.submit(decode.client.post, body(prompts(20)))
            _check_told(decode)
            assert silent.result().json()["error"]["code"] == "engine_stalled"
            stream.read_all()
            assert stream.error is not None
            assert stream.error["code"] == "engine_stalled"
            _check_ended(impatient.cluster, decode, engine_pid)


def test_requests_of_a_stopped_engine_go_to_the_other_decode_worker(
    impatient, second, pool, prompts, reference
):
    """Those that came to it, those that were sent there, and those that come while its stall is
    known.
    """
    first, requested = impatient.decode, [prompts(30) for _ in range(3)]
    with first.client.stream(prompts(20), "local", max_tokens=1900) as stream:
        stream.read_tokens(1)
        _wait_relayed(first, second, prompts)
        with second.engine_stopped():
            answers: list[Future[httpx.Response]] = [
                pool.submit(worker.client.post, body(prompt, "local"))
                for worker, prompt in zip((second, first), requested, strict=False)
            ]
            second.wait_for(
                lambda: _status(second, "/ready") != httpx.codes.OK, "the stall is seen"
            )
            answers.append(pool.submit(second.client.post, body(requested[2], "local")))
            for prompt, answer in zip(requested, answers, strict=True):
                reference.check(prompt, answer_of(answer.result()).tokens)
            _check_relayed_to_its_end(second, prompts)
        stream.read_all()
        assert stream.done
    assert _status(first, "/ready") == httpx.codes.OK


async def test_supervisor_restarts_a_worker_whose_engine_stalls(new_cluster):
    cluster, said = new_cluster("supervised"), list[str]()
    worker = cluster.add_worker("mixed", "supervised-0", start=False)
    worker.write_policy({"stallSeconds": 1})
    command, environment = worker.invocation()
    supervisor = Supervisor([Launch(worker.name, command, worker.log, environment)], said.append)
    (process,) = supervisor.managed_processes
    supervisor.start()
    try:
        before = await asyncio.to_thread(_wait_engine, cluster, worker.name, "")
        assert process.pid is not None
        (engine,) = psutil.Process(process.pid).children()
        engine.suspend()
        await asyncio.to_thread(_wait_engine, cluster, worker.name, before)
    finally:
        supervisor.drain()
        await supervisor.wait_drained(asyncio.Event())

    assert process.num_starts == 2
    assert "ended with code 1, starts again" in said[0]
    assert LAST_WORDS in said[0]
    assert not psutil.pid_exists(engine.pid)


def _check_relayed_to_its_end(worker: WorkerProcess, prompts: Prompts) -> None:
    """An answer that comes through a worker outlives its engine, which is killed meanwhile."""
    engine_pid = worker.engine_pid
    with worker.client.stream(prompts(20), "local", max_tokens=1900) as relayed:
        relayed.read_tokens(1)
        worker.terminate()  # its engine is killed at the next look
        wait_for(lambda: not psutil.pid_exists(engine_pid), SETTLE_SECONDS, "the engine is killed")
        relayed.read_all()
        assert relayed.done
        assert worker.wait_end() == 1
    assert LAST_WORDS in worker.log_tail(1)


def _status(worker: WorkerProcess, path: str) -> int:
    return worker.client.http.get(path).status_code


def _check_told(worker: WorkerProcess) -> None:
    """Its probes and its gauge say that its engine has stalled, before it ends."""
    worker.wait_for(
        lambda: _status(worker, "/health") == httpx.codes.SERVICE_UNAVAILABLE, "it is not live"
    )
    reply = worker.client.http.get("/ready")
    assert reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "has stalled" in reply.json()["reason"]
    assert worker.metrics().value("engine_stalled") == 1


def _check_ended(cluster: Cluster, worker: WorkerProcess, engine_pid: int) -> None:
    """It has ended by itself, with its engine, and says why in its last line."""
    assert worker.wait_end() == 1
    assert LAST_WORDS in worker.log_tail(1)
    assert not psutil.pid_exists(engine_pid)
    assert cluster.record(worker.name) is None


def _wait_relayed(first: WorkerProcess, second: WorkerProcess, prompts: Prompts) -> None:
    before = second.metrics()

    def is_relayed() -> bool:
        first.client.complete(prompts(5), "local", max_tokens=1)
        return second.growth(before, "generation_tokens_total") > 0

    first.wait_for(is_relayed, "requests go to the other decode worker")


def _wait_engine(cluster: Cluster, pod: str, other_than: str) -> str:
    """Until a worker with another engine is registered; its engine id."""

    def engine_id() -> str:
        record = cluster.record(pod) or {"engine_id": ""}
        return "" if record["engine_id"] == other_than else record["engine_id"]

    return wait_for(engine_id, READY_SECONDS + SETTLE_SECONDS, f"{pod} has a new engine")
