"""One worker's drain from its command to its end: in mid-transfer, withdrawn, commanded again, met
by SIGTERM, without etcd.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.system.cluster import Pair
from tests.system.worker_process import WorkerProcess

NUM_FLIPS = 25


@pytest.fixture
def commanded(pair: Pair) -> Iterator[Pair]:
    """A pair without any command, at the end too."""
    yield pair
    for name in pair.cluster.workers:
        pair.cluster.command(name, drain=False)
    pair.cluster.heal()


class Log:
    """Log of a worker from now on."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._path = worker.log
        self._start = worker.log.stat().st_size

    def count(self, text: str) -> int:
        return self._path.read_bytes()[self._start :].count(text.encode())


def is_ready(worker: WorkerProcess) -> bool:
    return worker.client.http.get("/ready").status_code == httpx.codes.OK


def test_prefill_worker_drained_in_mid_transfer_finishes_it(slow, prompts, reference):
    prompt, before = prompts(1000), slow.decode.metrics()
    with (
        slow.decode.client.stream(prompt, "remote") as stream,
        slow.cluster.drained_by_command(slow.prefill.name),
    ):
        stream.read_tokens(1)  # made at once, and the blocks move for seconds
        slow.cluster.wait_state(slow.prefill.name, "draining")
        assert slow.prefill.metrics().value("draining") >= 1
        assert slow.decode.client.complete(prompts(300), "auto", max_tokens=1).prefill == "local"
        tokens = stream.read_all()
        slow.cluster.wait_state(slow.prefill.name, "drained")
        assert slow.prefill.metrics().value("draining") == 0

    assert stream.done
    reference.check(prompt, tokens)
    slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    slow.decode.wait_for(
        lambda: slow.decode.client.complete(prompts(300), max_tokens=1).prefill == "remote",
        "prefill serves again",
    )


def test_requests_that_wait_for_a_draining_prefill_worker_are_served(slow, prompts, reference):
    """A promised credit is kept; requests without one prefill here, and none fails."""
    cluster, decode, waiting = slow.cluster, slow.decode, [prompts(300) for _ in range(4)]
    with ThreadPoolExecutor(len(waiting)) as pool:
        with slow.prefill.engine_stopped():  # a request with a credit keeps it, and the others wait
            answers = [
                pool.submit(decode.client.complete, prompt, "auto", max_tokens=4)
                for prompt in waiting
            ]
            decode.wait_for(
                lambda: decode.metrics().value("prefill_queue_requests") == len(waiting) - 1,
                "some wait for a credit",
            )
            cluster.command(slow.prefill.name, drain=True)
            decode.wait_for(
                lambda: decode.metrics().value("prefill_queue_requests") == 0,
                "they wait for it no more",
            )
        for prompt, answer in zip(waiting, answers, strict=True):
            reference.check(prompt, answer.result().tokens)
        cluster.wait_state(slow.prefill.name, "drained")
        cluster.command(slow.prefill.name, drain=False)

    assert sorted(answer.result().prefill for answer in answers) == ["local"] * (
        len(waiting) - 1
    ) + ["remote"]
    slow.prefill.wait_ready()


def test_command_that_is_withdrawn_in_the_middle_lets_the_worker_serve_again(
    slow, prompts, reference
):
    cluster, decode, prompt = slow.cluster, slow.decode, prompts(20)
    with decode.client.stream(prompt, "local", max_tokens=300) as stream:
        stream.read_tokens(1)
        with decode.engine_stopped():  # else the stream may end first
            with cluster.drained_by_command(decode.name):
                cluster.wait_state(decode.name, "draining")
                assert not is_ready(decode)
            cluster.wait_state(decode.name, "ready")
        assert len(decode.client.complete(prompts(10), "local", max_tokens=2).tokens) == 2
        assert not stream.done
        tokens = stream.read_all()

    assert (stream.done, len(tokens)) == (True, 300)
    reference.check(prompt, tokens[:200])


@pytest.mark.parametrize(
    ("drain", "state"), [(True, "drained"), (False, "ready")], ids=["drain", "serve"]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_last_of_many_quick_commands_wins(commanded, prompts, role, drain, state):
    worker = {"prefill": commanded.prefill, "decode": commanded.decode}[role]
    # the first and the last flip drain
    name, log, num_changes = worker.name, Log(worker), NUM_FLIPS + (not drain)
    for turn in range(NUM_FLIPS):
        commanded.cluster.command(name, drain=turn % 2 == 0)
    commanded.cluster.command(name, drain=drain)

    # A command before the last one may be the reason of the same state: wait until the worker has
    # seen them all.
    worker.wait_for(
        lambda: log.count("drain command present=") >= num_changes, f"{name} sees every command"
    )
    commanded.cluster.wait_state(name, state)
    worker.wait_for(lambda: is_ready(worker) is not drain, f"{name} obeys")
    if not drain:
        answer = commanded.decode.client.complete(prompts(300), "auto", max_tokens=1500)
        assert answer.tokens
    assert (commanded.cluster.records()[name]["state"], is_ready(worker)) == (state, not drain)


def test_worker_that_restarts_obeys_the_command_that_is_there(commanded):
    cluster, prefill = commanded.cluster, commanded.prefill
    engine_id = prefill.record["engine_id"]
    cluster.command(prefill.name, drain=True)
    cluster.wait_state(prefill.name, "drained")
    prefill.terminate()
    assert prefill.wait_end() == 0  # it had drained: nothing to wait for
    assert cluster.record(prefill.name) is None

    log = Log(prefill)
    prefill.restart(wait=False)
    cluster.wait_state(prefill.name, "drained")
    assert cluster.records()[prefill.name]["engine_id"] != engine_id
    assert log.count("state=ready") == 0
    cluster.command(prefill.name, drain=False)
    prefill.wait_ready()
    cluster.wait_state(prefill.name, "ready")


def test_sigterm_in_a_drain_by_command_ends_in_order(commanded, prompts, reference):
    cluster, decode, prompt, log = (
        commanded.cluster,
        commanded.decode,
        prompts(60),
        Log(commanded.decode),
    )
    with decode.client.stream(prompt, "remote", max_tokens=1000) as stream:
        stream.read_tokens(2)
        cluster.command(decode.name, drain=True)
        cluster.wait_state(decode.name, "draining")
        decode.terminate()
        decode.wait_for(lambda: log.count("asked to end") == 1, "the signal has come")
        cluster.command(decode.name, drain=False)  # too late: the process is to end
        decode.wait_for(
            lambda: log.count("drain command present=False") == 1, "it has read the change"
        )
        assert log.count("state=ready") == 0
        tokens = stream.read_all()

    assert (stream.done, len(tokens)) == (True, 1000)
    reference.check(prompt, tokens[:200])
    assert decode.wait_end() == 0
    assert cluster.record(decode.name) is None


def test_command_in_the_drain_of_sigterm_changes_nothing(commanded, prompts, reference):
    cluster, decode, prompt, log = (
        commanded.cluster,
        commanded.decode,
        prompts(60),
        Log(commanded.decode),
    )
    with decode.client.stream(prompt, "local", max_tokens=1000) as stream:
        stream.read_tokens(2)
        decode.terminate()
        cluster.wait_state(decode.name, "draining")
        for present in (True, False, True):
            cluster.command(decode.name, drain=present)
        decode.wait_for(
            lambda: log.count("drain command present=True") == 2, "it has read the change"
        )
        tokens = stream.read_all()

    assert (stream.done, len(tokens)) == (True, 1000)
    reference.check(prompt, tokens[:200])
    assert decode.wait_end() == 0
    assert log.count("state=ready") == 0


@pytest.mark.parametrize("by_command", [True, False], ids=["command", "sigterm"])
def test_drain_waits_for_a_client_that_has_not_taken_its_answer(commanded, prompts, by_command):
    """No request runs any more, and the answer would go with the network of a pod."""
    cluster, decode = commanded.cluster, commanded.decode
    before = decode.metrics()
    with decode.client.slow(prompts(20), "local", max_tokens=200, logprobs=5) as read:
        decode.wait_growth(before, "request_success_total", 1, finish_reason="length")
        if by_command:
            cluster.command(decode.name, drain=True)
        else:
            decode.terminate()
        decode.wait_for(
            lambda: decode.metrics().value("draining") == 1, "it waits for the client alone"
        )
        cluster.wait_state(decode.name, "draining")
        answer = read()

    assert json.loads(answer)["usage"]["completion_tokens"] == 200
    if by_command:
        cluster.wait_state(decode.name, "drained")
    else:
        assert decode.wait_end() == 0


@pytest.mark.parametrize("by_command", [True, False], ids=["command", "sigterm"])
def test_drain_ends_though_etcd_is_gone(commanded, prompts, reference, by_command):
    cluster, decode, prompt, log = (
        commanded.cluster,
        commanded.decode,
        prompts(60),
        Log(commanded.decode),
    )
    try:
        with decode.client.stream(prompt, "remote", max_tokens=1000) as stream:
            stream.read_tokens(2)
            if by_command:
                cluster.command(decode.name, drain=True)
                cluster.wait_state(decode.name, "draining")
            cluster.etcd.kill()
            if not by_command:
                decode.terminate()
            tokens = stream.read_all()
        assert (stream.done, len(tokens)) == (True, 1000)
        reference.check(prompt, tokens[:200])
        if by_command:
            decode.wait_for(lambda: log.count("state=drained") == 1, "it has drained")
            decode.terminate()
        assert decode.wait_end() == 0
    finally:
        cluster.etcd.kill()
        cluster.etcd.start()
