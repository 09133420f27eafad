"""An etcd that dies for longer than a lease, and one that comes back empty, lose no request and
heal by themselves.
"""

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.system.cluster import LEASE_SECONDS, Pair
from tests.system.waiting import wait_for

HEAL_SECONDS = 30.0


@pytest.fixture
def lossy(pair: Pair) -> Iterator[Pair]:
    """A pair whose etcd the test may kill; it is back afterwards, and everybody in it again."""
    yield pair
    pair.cluster.etcd.kill()
    pair.cluster.etcd.start()
    wait_for(
        lambda: len(pair.cluster.records()) == 2,
        HEAL_SECONDS,
        lambda: f"both workers registered: {pair.cluster.records()}",
    )


def test_outage_longer_than_the_lease_loses_no_request(lossy, prompts, reference):
    away_until = 0.0

    def ask_both_ways() -> None:
        for place in ("remote", "local"):
            prompt = prompts(60)
            answer = lossy.decode.client.complete(prompt, place)
            assert answer.prefill == place
            reference.check(prompt, answer.tokens)

    prompt = prompts(50)
    with lossy.decode.client.stream(prompt, "remote", max_tokens=1000) as stream:
        stream.read_tokens(2)
        lossy.cluster.etcd.kill()
        away_until = time.monotonic() + 2 * LEASE_SECONDS
        tokens = stream.read_all()
    assert (stream.done, len(tokens)) == (True, 1000)
    while time.monotonic() < away_until:
        ask_both_ways()
    assert [w.client.http.get("/ready").status_code for w in (lossy.prefill, lossy.decode)] == [
        httpx.codes.OK
    ] * 2
    lossy.cluster.etcd.start()

    wait_for(
        lambda: len(lossy.cluster.records()) == 2, HEAL_SECONDS, "both workers are registered again"
    )
    ask_both_ways()


def test_etcd_that_comes_back_empty_is_filled_again(lossy, prompts, reference):
    engines = {name: record["engine_id"] for name, record in lossy.cluster.records().items()}
    prompt = prompts(50)
    with lossy.decode.client.stream(prompt, "remote", max_tokens=1000) as stream:
        stream.read_tokens(2)
        lossy.cluster.etcd.kill()
        lossy.cluster.etcd.start(empty=True)
        tokens = stream.read_all()
    assert (stream.done, len(tokens)) == (True, 1000)
    reference.check(prompt[:50], tokens[:100])

    wait_for(
        lambda: len(lossy.cluster.records()) == 2, HEAL_SECONDS, "both workers are registered again"
    )
    assert {
        name: record["engine_id"] for name, record in lossy.cluster.records().items()
    } == engines
    again = prompts(60)
    answer = lossy.decode.client.complete(again, "remote")
    assert answer.prefill == "remote"
    reference.check(again, answer.tokens)
