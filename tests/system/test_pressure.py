"""T7 and T8: more requests than fit wait, are preempted and come out right; ids that clients give
never mix two streams.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest

from pdcluster_worker.messages.requests import SamplingParams
from tests.system.client import body
from tests.system.cluster import NewCluster, Pair
from tests.system.worker_process import WorkerProcess

NUM_BLOCKS = 24
"""Blocks of the tight cluster's decode worker: 384 tokens."""


@pytest.fixture(scope="module")
def tight_cluster(open_cluster: NewCluster) -> Iterator[Pair]:
    with open_cluster("tight") as cluster:
        prefill = cluster.add_worker("prefill", "tight-prefill-0")
        yield Pair(
            cluster,
            prefill,
            cluster.add_worker(
                "decode", "tight-decode-0", numBlocks=NUM_BLOCKS, prefixCaching=False
            ),
        )


@pytest.fixture
def tight(tight_cluster: Pair) -> Iterator[Pair]:
    """A pair whose decode worker has few blocks."""
    tight_cluster.cluster.heal()
    yield tight_cluster
    tight_cluster.cluster.wait_settled()


class Watcher:
    """Keeps the highest value that a gauge shows while the block runs."""

    def __init__(self, worker: WorkerProcess, *names: str) -> None:
        self.highest = dict.fromkeys(names, 0.0)
        self._worker = worker
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            metrics = self._worker.metrics()
            self.highest = {
                name: max(value, metrics.value(name)) for name, value in self.highest.items()
            }


@pytest.mark.parametrize("places", [("local",), ("remote",), ("local", "remote")], ids="-".join)
def test_requests_beyond_the_pool_wait_and_all_finish(tight, prompts, reference, places):  # T7
    cases = [(prompts(90 + index), places[index % len(places)]) for index in range(16)]
    with (
        Watcher(tight.decode, "num_requests_waiting") as watcher,
        ThreadPoolExecutor(len(cases)) as pool,
    ):
        answers = list(
            pool.map(lambda case: tight.decode.client.complete(*case, max_tokens=100), cases)
        )

    for (prompt, place), answer in zip(cases, answers, strict=True):
        assert (answer.prefill, len(answer.tokens)) == (place, 100)
        reference.check(prompt, answer.tokens[:40])
    assert watcher.highest["num_requests_waiting"] > 0  # for blocks here, also with a credit


@pytest.mark.parametrize("place", ["local", "remote"])
# T6
def test_preempted_requests_come_out_right(tight, prompts, reference, place):
    # Six times 30 tokens fit; six times 180 do not.
    cases = [prompts(30) for _ in range(6)]
    before = tight.decode.metrics()
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(
                lambda prompt: tight.decode.client.complete(prompt, place, max_tokens=150), cases
            )
        )

    for prompt, answer in zip(cases, answers, strict=True):
        assert (answer.prefill, len(answer.tokens)) == (place, 150)
        reference.check(prompt, answer.tokens)
    assert tight.decode.growth(before, "preemptions_total") > 0


def test_preempted_seeded_requests_equal_undisturbed_ones(tight, pair, prompts, reference):
    cases = [prompts(30) for _ in range(6)]
    sampling = SamplingParams(
        max_tokens=150,
        seed=7,
        temperature=0.8,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        ignore_eos=True,
    )
    fields = msgspec.to_builtins(sampling)
    before = tight.decode.metrics()
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(
            pool.map(lambda prompt: tight.decode.client.complete(prompt, "remote", **fields), cases)
        )

    assert tight.decode.growth(before, "preemptions_total") > 0
    for prompt, answer in zip(cases, answers, strict=True):
        undisturbed = pair.decode.client.complete(prompt, "local", **fields)
        reference.check_sampled(prompt, undisturbed.tokens, answer.tokens, sampling)


def test_request_that_could_never_fit_is_refused_at_once(tight, prompts):
    for place in ("local", "remote"):
        reply = tight.decode.client.post(body(prompts(NUM_BLOCKS * 16 - 4), place, max_tokens=20))
        assert reply.status_code == 400
        assert "error" in reply.json()


def test_requests_beyond_the_queue_bound_get_a_retry_after(slow, prompts):
    def num_refused() -> int:
        requests = [body(prompts(400), "local", max_tokens=1) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(slow.decode.client.post, requests))
        refused = [
            reply for reply in replies if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
        ]
        assert all(
            reply.json()["error"]["code"] == "queue_full" and "retry-after" in reply.headers
            for reply in refused
        )
        return len(refused)

    before = slow.decode.metrics()
    try:
        slow.decode.write_policy({"admission": {"maxQueuedRequests": 1}})
        slow.decode.wait_for(lambda: num_refused() == 1, "one of two is refused")
        assert slow.decode.growth(before, "request_rejected_total", reason="queue_full") == 1
    finally:
        slow.decode.write_policy({})
        slow.decode.wait_for(lambda: num_refused() == 0, "both are served again")


def test_low_priority_gets_less_under_load_and_is_refused_beyond_its_objective(pair, prompts):
    """By what the worker has measured of its own streams; a policy takes effect while it runs."""
    policy = {
        "allowClientPriority": True,
        "slo": {"ttftMilliseconds": 60_000, "tpotMilliseconds": 0.001},
    }

    def ask(priority: str) -> httpx.Response:
        return pair.decode.client.post(body(prompts(20), "local", max_tokens=8, priority=priority))

    try:
        pair.decode.write_policy(policy | {"degradation": {"maxTokens": 2}})
        pair.decode.wait_for(
            lambda: ask("low").headers.get("x-pdcluster-degraded") == "max_tokens=2",
            "low priority gets two tokens",
        )
        low, high = ask("low").json(), ask("high").json()
        assert (low["pdcluster"], low["usage"]["completion_tokens"]) == (
            {"degraded": ["max_tokens=2"]},
            2,
        )
        assert ("pdcluster" in high, high["usage"]["completion_tokens"]) == (False, 8)
        pair.decode.write_policy(policy | {"earlyRejection": {"enabled": True}})
        pair.decode.wait_for(
            lambda: ask("low").status_code == httpx.codes.TOO_MANY_REQUESTS,
            "low priority is refused",
        )
        refused = ask("low")
        assert refused.json()["error"]["code"] == "slo_tpot"
        assert int(refused.headers["retry-after"]) >= 1
        assert ask("high").status_code == ask("normal").status_code == httpx.codes.OK
    finally:
        pair.decode.write_policy({})


@pytest.mark.parametrize("place", ["local", "remote"])
# T8
def test_equal_client_ids_never_mix_streams(pair, prompts, reference, place):
    cases = [prompts(50 + index) for index in range(8)]

    def ask(prompt: list[int]) -> list[int]:
        with pair.decode.client.stream(
            prompt, place, headers={"x-request-id": "the-same"}, user="the-same", max_tokens=30
        ) as stream:
            return stream.read_all()

    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(ask, cases))

    for prompt, tokens in zip(cases, answers, strict=True):
        assert len(tokens) == 30
        reference.check(prompt, tokens)
