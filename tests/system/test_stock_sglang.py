"""A mixed worker around a real, stock SGLang on this CPU.

It runs where PDCLUSTER_TEST_SGLANG is set, and holds that SGLang does what the adapter takes for
granted.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.reference import Reference
from tests.system.client import body
from tests.system.cluster import NewCluster
from tests.system.stock_sglang import BLOCK, NOT_ASKED, is_installed, sglang_engine
from tests.system.stock_vllm import LEASE_SECONDS, START_SECONDS, make_wide_model
from tests.system.worker_process import WorkerProcess

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason=NOT_ASKED),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def worker(open_cluster: NewCluster, wide_model: Path) -> Iterator[WorkerProcess]:
    with open_cluster("sglang") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        worker = cluster.add_worker("mixed", "sglang-mixed-0", model=wide_model, start=False)
        worker.settings["engine"] = sglang_engine(wide_model)
        worker.start()
        worker.wait_ready(START_SECONDS)
        yield worker


def wait_idle(worker: WorkerProcess) -> None:
    """Wait until the engine itself holds no block and runs nothing."""
    worker.wait_for(
        lambda: worker.blocks()["in_use"] == 0, lambda: f"{worker.name} holds {worker.blocks()}"
    )


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, 100])
def test_its_tokens_are_those_of_the_model(worker, wide_model, prompts, num_tokens):
    prompt, before = prompts(num_tokens), worker.settled_metrics()

    answer = worker.client.complete(prompt)

    Reference(wide_model).check(prompt, answer.tokens)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage["prompt_tokens"] == num_tokens
    assert answer.usage["completion_tokens"] == 8
    worker.wait_growth(before, "generation_tokens_total", 8)
    assert worker.client.http.get("/version").json()["device"]["operations"] == "sglang 0.5.23"


def test_log_probabilities_of_an_answer_are_those_of_the_same_tokens_as_a_prompt(worker, prompts):
    prompt = prompts(40)
    made = worker.client.complete(prompt, logprobs=2, temperature=0.5, seed=3)

    given = worker.client.complete([*prompt, *made.tokens], logprobs=2, echo=True, max_tokens=1)

    expected = given.choices[0].logprobs[len(prompt) : -1]
    assert made.choices[0].logprobs == pytest.approx(expected, abs=1e-4)


def test_the_second_turn_hits_the_prefix_cache_and_the_index_knows_it(worker, prompts):
    prompt = prompts(200)
    first = worker.client.complete(prompt)

    again = worker.client.complete([*prompt, *first.tokens, 7])

    assert again.cached_tokens >= 192


def test_an_abort_reaches_the_engine(worker, prompts):
    with worker.client.stream(prompts(64), max_tokens=900) as stream:
        stream.read_tokens(3)

    wait_idle(worker)
    assert worker.metrics().value("num_requests_running") == 0


def test_an_answer_ends_at_a_stop_token(worker, prompts):
    prompt = prompts(30)
    stop = worker.client.complete(prompt).tokens[3]

    answer = worker.client.complete(prompt, ignore_eos=False, stop_token_ids=[stop])

    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage["completion_tokens"] <= 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "(["}}, "rammar"),
        ({"stop_token_ids": [5]}, "stop_token_ids have no effect beside ignore_eos"),
        ({"repetition_penalty": 3.0}, "repetition_penalty must be in (0, 2]"),
    ],
)
def test_a_refusal_is_a_400_by_name(worker, prompts, fields, message):
    reply = worker.client.post(body(prompts(4), max_tokens=4, **fields))

    assert reply.status_code == httpx.codes.BAD_REQUEST, reply.text
    assert message in reply.text


def test_a_drain_lets_a_stream_end(worker, prompts):
    with worker.client.stream(prompts(40), max_tokens=200) as stream:
        stream.read_tokens(3)
        worker.terminate()
        tokens = stream.read_all()

    assert len(tokens) == 200
    assert stream.done
    assert worker.wait_end() == 0
    worker.restart(wait=False)
    worker.wait_ready(START_SECONDS)


def test_an_engine_that_dies_ends_its_streams_and_its_worker(worker, prompts):
    with worker.client.stream(prompts(10), max_tokens=900) as stream:
        stream.read_tokens(3)
        (server,) = psutil.Process(worker.engine_pid).children()
        server.kill()
        stream.read_all()

    assert stream.error is not None
    assert not stream.done
    assert worker.wait_end() == 1
    worker.restart(wait=False)
    worker.wait_ready(START_SECONDS)
