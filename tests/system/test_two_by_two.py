"""Two prefill and two decode workers: requests that go over a second decode worker, and kills under load.

The load is 200 concurrent streams, with one worker of each role killed and
restarted in between.  Every answer that ends with [DONE] is right.  Streams of
the killed ingress end without it; any other one may end only well or in a clean
error.  Afterwards every pool is back to its free count.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest

from tests.reference import Reference
from tests.system.cluster import Cluster, NewCluster
from tests.system.load import Load, Outcome
from tests.system.prompts import Prompts
from tests.system.worker_process import WorkerProcess

NUM_REQUESTS = 200
MAX_TOKENS = 24
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
        prefills = [cluster.add_worker("prefill", f"prefill-{index}", numBlocks=256) for index in range(2)]
        yield Square(cluster, prefills, [cluster.add_worker("decode", f"decode-{index}", numBlocks=256) for index in range(2)])


@pytest.fixture
def square(square_cluster: Square) -> Iterator[Square]:
    """All four, ready; a test may kill them."""
    square_cluster.cluster.heal()
    yield square_cluster
    square_cluster.cluster.wait_settled()


@pytest.fixture
def busy(square: Square, prompts: Prompts) -> Iterator[None]:
    """While decode-0 has a request, the next ones that come to it go to decode-1."""
    first, second = square.decodes
    with first.client.stream(prompts(20), "local", max_tokens=1900) as stream:
        stream.read_tokens(1)
        before = second.metrics()

        def is_relayed() -> bool:  # not while a report, up to a second old, says that decode-1 has a request of an earlier test
            first.client.complete(prompts(5), "local", max_tokens=1)
            return second.growth(before, "generation_tokens_total") > 0

        first.wait_for(is_relayed, "requests go to decode-1")
        yield


@pytest.mark.parametrize("place", ["local", "remote"])
def test_request_goes_to_the_decode_worker_with_fewer(
    square: Square, busy: None, prompts: Prompts, reference: Reference, place: str
) -> None:
    prompt, before = prompts(50), square.decodes[1].metrics()

    answer = square.decodes[0].client.complete(prompt, place)

    assert answer.prefill == place
    reference.check(prompt, answer.tokens)
    square.decodes[1].wait_growth(before, "generation_tokens_total", len(answer.tokens) - (place == "remote"))


def test_request_goes_to_the_decode_worker_that_has_its_prefix(square: Square, prompts: Prompts, reference: Reference) -> None:
    """decode-1 gets prompts of its own; as soon as its events have come, decode-0 sends it what begins like them."""
    first, second = square.decodes
    first.take_policy({"decodeScore": {"policy": "kvAware"}})
    before, tried = second.metrics(), 0
    seeded: list[list[int]] = []

    def is_relayed() -> bool:  # what is tried was seeded ever longer ago: events take up to a second
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


def test_decode_peer_lost_after_the_first_token_is_a_clean_error(square: Square, busy: None, prompts: Prompts) -> None:
    with square.decodes[0].client.stream(prompts(50), "local", max_tokens=1900) as stream:
        stream.read_tokens(2)
        square.decodes[1].kill()
        stream.read_all()

    assert not stream.done
    assert stream.error is not None
    assert stream.error["code"] == "decode_worker_lost"


def test_decode_peer_lost_before_the_first_token_means_another_try(
    square: Square, busy: None, prompts: Prompts, reference: Reference
) -> None:
    prompt, lost = prompts(50), square.decodes[1]
    with lost.engine_stopped(), ThreadPoolExecutor(1) as pool:  # no token comes
        answer = pool.submit(square.decodes[0].client.complete, prompt, "local")
        square.decodes[0].wait_for(lambda: "prompt_tokens=50" in square.decodes[0].log_tail(3), "the request is accepted")
        lost.kill()
        reference.check(prompt, answer.result().tokens)


async def test_kills_under_load_never_give_a_wrong_answer(square: Square, prompts: Prompts, reference: Reference) -> None:
    prefills, decodes = square.prefills, {worker.name: worker for worker in square.decodes}
    random = Random(0)
    places = ["auto", "local", "remote"]
    outcomes = [Outcome(prompts(random.randrange(1, 200)), f"decode-{index % 2}", random.choice(places)) for index in range(NUM_REQUESTS)]
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
