"""Two engine processes behind one worker address [V27] [V28]: the same tokens, and the death of one
is its own.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.system.cluster import NewCluster, Pair
from tests.system.prompts import Prompts
from tests.system.worker_process import WorkerProcess

TWO = {"dataParallelSize": 2, "threads": 2}
LENGTHS = (1, 15, 16, 17, 33, 64, 100, 200, 300, 320)
MAX_TOKENS = 12
STREAMED = 400  # long enough to kill an engine in the middle


@pytest.fixture(scope="module")
def twos_cluster(open_cluster: NewCluster) -> Iterator[Pair]:
    with open_cluster("twos") as cluster:
        delayer = {"prefillDelayer": {"maxDelayPasses": 3}}  # its engines share a board
        workers = [
            cluster.add_worker("prefill", "twos-prefill-0", start=False, **TWO, **delayer),
            cluster.add_worker("decode", "twos-decode-0", start=False, **TWO),
        ]
        for worker in workers:
            worker.settings["listen"]["kv"] = 0
            worker.start()
        yield Pair(cluster, *workers)


@pytest.fixture
def twos(twos_cluster: Pair) -> Pair:
    """Both workers, ready; a test may end one."""
    for worker in (twos_cluster.prefill, twos_cluster.decode):
        if not worker.is_alive:
            worker.start()
    twos_cluster.cluster.wait_ready()
    for worker in (twos_cluster.prefill, twos_cluster.decode):
        worker.let_engines_yield()
    return twos_cluster


def requests_by_engine(worker: WorkerProcess) -> dict[str, float]:
    return worker.metrics().by_label("engine_requests_total", "engine")


@pytest.mark.parametrize("prefill", ["local", "remote"])
def test_tokens_of_two_engines_are_those_of_one(twos, reference, prefill):
    prompts = Prompts("two engines")
    cases = [prompts(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(
                lambda prompt: twos.decode.client.complete(prompt, prefill, max_tokens=MAX_TOKENS),
                cases,
            )
        )

    for prompt, answer in zip(cases, answers, strict=True):
        assert answer.prefill == prefill
        assert len(answer.tokens) == MAX_TOKENS
        reference.check(prompt, answer.tokens)
    for worker in (twos.decode, twos.prefill)[: 1 + (prefill == "remote")]:
        shares = requests_by_engine(worker)
        assert set(shares) == {"0", "1"}, shares
        assert min(shares.values()) > 0, shares
    twos.cluster.wait_settled()
    if prefill == "remote":  # [S7]: of both engines, by their shared board
        assert twos.prefill.metrics().value("prefill_delayer_wait_passes_count") > 0


def test_worker_of_two_engines_states_both_and_divides_its_memory(twos):
    record = twos.decode.record
    first, second = record["engines"]
    assert [(e["rank"], e["state"]) for e in (first, second)] == [(0, "ready"), (1, "ready")]
    assert (record["engine_id"], record["kv_address"]) == (first["engine_id"], first["kv_address"])
    assert first["kv_address"] != second["kv_address"]

    num_blocks = twos.decode.settings["engine"]["numBlocks"]
    assert sum(twos.decode.blocks().values()) == num_blocks
    assert twos.decode.metrics().by_label("engine_up", "engine") == {"0": 1, "1": 1}


def test_streams_of_an_engine_that_dies_go_on_at_the_other_and_it_comes_back(
    twos, prompts, reference
):
    decode = twos.decode
    cases = [prompts(10) for _ in range(4)]
    with ExitStack() as stack:
        streams = [
            stack.enter_context(decode.client.stream(prompt, "local", max_tokens=STREAMED))
            for prompt in cases
        ]
        for stream in streams:
            stream.read_tokens(1)
        os.kill(decode.engine_pid_of(1), signal.SIGKILL)
        tokens = [stream.read_all() for stream in streams]

    for prompt, stream, made in zip(cases, streams, tokens, strict=True):
        assert (len(made), stream.done) == (STREAMED, True), stream.error
        reference.check(prompt, made[:MAX_TOKENS])
    assert decode.metrics().value("request_moves_total", reason="lost", outcome="moved") == 2

    health = decode.client.http.get("/health")
    if decode.metrics().value("engine_up", engine="1") == 0:  # it may be back already
        assert health.status_code == httpx.codes.OK
        assert "engine 1 is lost: its process ended with status -9" in health.json()["reason"]
    reference.check(
        cases[0], decode.client.complete(cases[0], "remote", max_tokens=MAX_TOKENS).tokens
    )

    decode.wait_for(
        lambda: decode.metrics().value("engine_restarts_total", engine="1") == 1,
        "the engine is back",
    )
    decode.wait_for(
        lambda: (
            [e["state"] for e in (twos.cluster.record(decode.name) or {})["engines"]]
            == ["ready"] * 2
        ),
        "it says so",
    )
    before = requests_by_engine(decode)
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda prompt: decode.client.complete(prompt, "remote", max_tokens=MAX_TOKENS),
                cases,
            )
        )
    for prompt, answer in zip(cases, answers, strict=True):
        reference.check(prompt, answer.tokens)
    assert all(requests_by_engine(decode)[rank] > before[rank] for rank in ("0", "1"))
    twos.cluster.wait_settled()


def test_worker_whose_engines_all_die_ends(twos):
    for pid in [twos.decode.engine_pid_of(rank) for rank in range(2)]:
        os.kill(pid, signal.SIGKILL)

    assert twos.decode.wait_end() == 1
    assert (
        "the engine of this worker stopped: its process ended with status -9"
        in twos.decode.log_tail()
    )
