"""Two prefill and two decode workers: requests that go over a second decode worker, and kills under
load.

The load is 200 concurrent streams, with one worker of each role killed and
restarted in between.  Every answer that ends with [DONE] is right.  Streams of
the killed ingress end without it; any other one may end only well or in a clean
error.  Afterwards every pool is back to its free count.  A request that loses its
worker in mid-stream, the ingress being another one, ends as if nothing had been.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

import pytest

from tests.system.client import Json
from tests.system.cluster import Cluster, NewCluster
from tests.system.load import Load, Outcome
from tests.system.prompts import Prompts
from tests.system.tokens import text_of, tokens_in
from tests.system.worker_process import WorkerProcess

NUM_REQUESTS = 200
MAX_TOKENS = 24
LONG = 400  # long enough to end a worker in the middle
KILL_PREFILL_AFTER = 30
KILL_DECODE_AFTER = 80


@dataclass(frozen=True)
class Square:
    """Two workers of each role."""

    cluster: Cluster
    prefills: list[WorkerProcess]
    decodes: list[WorkerProcess]


@pytest.fixture(scope="module")
def square_cluster(open_cluster: NewCluster) -> Iterator[Square]:
    with open_cluster("square") as cluster:
        prefills = [
            cluster.add_worker("prefill", f"prefill-{index}", numBlocks=256) for index in range(2)
        ]
        yield Square(
            cluster,
            prefills,
            [cluster.add_worker("decode", f"decode-{index}", numBlocks=256) for index in range(2)],
        )


@pytest.fixture
def square(square_cluster: Square) -> Iterator[Square]:
    """All four, ready; a test may kill them."""
    square_cluster.cluster.heal()
    yield square_cluster
    square_cluster.cluster.wait_settled()


@contextmanager
def kept_busy(first: WorkerProcess, second: WorkerProcess, prompts: Prompts) -> Iterator[None]:
    """The first has a request, so the next ones that come to it go to the second."""
    with first.client.stream(prompts(20), "local", max_tokens=1900) as stream:
        stream.read_tokens(1)
        before = second.metrics()

        # not while a report, up to a second old, counts a request that has ended
        def is_relayed() -> bool:
            first.client.complete(prompts(5), "local", max_tokens=1)
            return second.growth(before, "generation_tokens_total") > 0

        first.wait_for(is_relayed, f"requests go to {second.name}")
        yield


@pytest.fixture
def busy(square: Square, prompts: Prompts) -> Iterator[None]:
    """While decode-0 has a request, the next ones that come to it go to decode-1."""
    with kept_busy(*square.decodes, prompts):
        yield


@pytest.mark.parametrize("place", ["local", "remote"])
def test_request_goes_to_the_decode_worker_with_fewer(square, busy, prompts, reference, place):
    prompt, before = prompts(50), square.decodes[1].metrics()

    answer = square.decodes[0].client.complete(prompt, place)

    assert answer.prefill == place
    reference.check(prompt, answer.tokens)
    square.decodes[1].wait_growth(
        before, "generation_tokens_total", len(answer.tokens) - (place == "remote")
    )


def test_request_goes_to_the_decode_worker_that_has_its_prefix(square, prompts, reference):
    """decode-1 gets prompts of its own; as soon as its events have come, decode-0 sends it what
    begins like them.
    """
    first, second = square.decodes
    first.take_policy({"decodeScore": {"policy": "kvAware"}})
    before, tried = second.metrics(), 0
    seeded: list[list[int]] = []

    # what is tried was seeded ever longer ago: events take up to a second
    def is_relayed() -> bool:
        nonlocal tried
        seeded.append(prompts(64))
        second.client.complete(seeded[-1], "local", max_tokens=1)
        if len(seeded) < 2 * (tried + 1):
            return False
        prompt = [*seeded[tried], *prompts(5)]
        tried += 1
        reference.check(prompt, first.client.complete(prompt, "local", max_tokens=4).tokens)
        return second.growth(before, "prefix_cache_hit_tokens_total") >= 64

    try:
        first.wait_for(is_relayed, "a request goes to decode-1, which has its prefix")
    finally:
        first.take_policy({})


SEEDED: Json = {
    "seed": 7,
    "temperature": 0.9,
    "top_p": 0.95,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "n": 2,
    "logprobs": 1,
    "min_tokens": 20,
}
"""Two choices, under rules that count what was made so far."""


@pytest.mark.parametrize("end", ["killed", "drained"])
@pytest.mark.parametrize("fields", [{"n": 1}, SEEDED], ids=["greedy", "two seeded choices"])
def test_request_moves_in_mid_stream_and_no_client_can_tell(square, prompts, end, fields):
    (ingress, leaves), prompt = square.decodes, prompts(100)
    plain = leaves.client.complete(prompt, "local", max_tokens=LONG, **fields)
    stop = text_of(plain.tokens[-20:-10])
    whole = [text_of(choice.tokens) for choice in plain.choices]
    before = ingress.metrics()
    with ExitStack() as stack:
        stack.enter_context(kept_busy(ingress, leaves, prompts))
        usage = {"stream_options": {"include_usage": True}, "stop": stop}
        stream = stack.enter_context(
            ingress.client.stream(prompt, "local", max_tokens=LONG, **fields, **usage)
        )
        stream.read_tokens(3)
        while len(stream.texts) < len(whole):
            assert stream.next()
        if end == "killed":
            leaves.kill()
        else:
            stack.enter_context(square.cluster.drained_by_command(leaves.name))
            # while its longest answer goes on elsewhere
            square.cluster.wait_state(leaves.name, "drained")
        stream.read_all()

    assert (stream.done, stream.error) == (True, None)
    assert [stream.texts[index] for index in range(len(whole))] == [
        text.partition(stop)[0] for text in whole
    ]
    made = [
        len(tokens_in(text.partition(stop)[0] + stop if stop in text else text)) for text in whole
    ]
    assert stream.usage is not None
    assert (stream.usage["prompt_tokens"], stream.usage["completion_tokens"]) == (100, sum(made))
    reason = "lost" if end == "killed" else "draining"
    assert ingress.growth(before, "request_moves_total", reason=reason, outcome="moved") == len(
        whole
    )
    # one that was killed has none
    assert (ingress.growth(before, "kv_handovers_total", outcome="ok") > 0) == (end == "drained")


def test_decode_peer_lost_before_the_first_token_means_another_try(
    square, busy, prompts, reference
):
    prompt, lost = prompts(50), square.decodes[1]
    with lost.engine_stopped(), ThreadPoolExecutor(1) as pool:  # no token comes
        answer = pool.submit(square.decodes[0].client.complete, prompt, "local")
        square.decodes[0].wait_for(
            lambda: "prompt_tokens=50" in square.decodes[0].log_tail(3), "the request is accepted"
        )
        lost.kill()
        reference.check(prompt, answer.result().tokens)


async def test_kills_under_load_never_give_a_wrong_answer(square, prompts, reference):
    prefills, decodes = square.prefills, {worker.name: worker for worker in square.decodes}
    random = Random(0)
    places = ["auto", "local", "remote"]
    outcomes = [
        Outcome(prompts(random.randrange(1, 200)), f"decode-{index % 2}", random.choice(places))
        for index in range(NUM_REQUESTS)
    ]
    load = Load(decodes, MAX_TOKENS)
    killed = decodes["decode-1"]

    running = asyncio.create_task(load.run(outcomes))
    await load.wait_done(KILL_PREFILL_AFTER)
    await asyncio.to_thread(prefills[0].kill)
    await asyncio.to_thread(prefills[0].restart, wait=False)
    await load.wait_done(KILL_DECODE_AFTER)
    await asyncio.to_thread(killed.kill)
    await asyncio.to_thread(killed.restart, wait=False)
    await running

    for outcome in outcomes:
        if outcome.done:
            assert outcome.stream is not None
            assert len(outcome.stream.tokens) == MAX_TOKENS
            reference.check(outcome.prompt, outcome.stream.tokens)
        elif outcome.ingress != killed.name:
            assert outcome.is_clean_error, outcome
    num_done = sum(outcome.done for outcome in outcomes)
    assert KILL_DECODE_AFTER <= num_done < NUM_REQUESTS  # the kill was felt, and the rest went on
    await asyncio.to_thread(square.cluster.wait_ready)
