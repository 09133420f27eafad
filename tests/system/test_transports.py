"""Remote prefill over NIXL and UCX: the same tokens, and failures in the middle of a transfer,
those of T1 to T12 that depend on the transport; clients that leave and workers that die in one over
tcp too.

Transfers are slow, so that a test can act in between.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.reference import Reference
from tests.system.client import Json
from tests.system.cluster import NewCluster, Pair, is_settled
from tests.system.conftest import SLOW, SLOW_BYTES_PER_SECOND
from tests.system.idle import MAX_SHARE, cpu_seconds
from tests.transports import need_transport

BLOCK = 16
WINDOW_SECONDS = 2.0
NUM_LIVES = 3
"""Lives of a prefill worker that dies again and again; bare writers have more of them in
tests/worker/kv_transfer/test_killed_writers.
"""

PREFILL_TOKENS = 64
"""Tokens of a step: a prompt is computed long before it is sent, also where cores are taken."""

MAX_GROWTH = 4 << 20
"""Bytes of the decode worker's engine for each life; two slots that are not used again."""

every_transport = pytest.mark.parametrize(
    "transport", ["tcp", "nixl", "ucx"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=["nixl", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return need_transport(request.param)


@pytest.fixture(scope="module")
def opened(open_cluster: NewCluster, transport: str) -> Iterator[Pair]:
    with open_cluster(f"over-{transport}") as cluster:
        settings: Json = {**SLOW, "transport": transport}
        prefill = cluster.add_worker(
            "prefill",
            f"{transport}-prefill-0",
            transferBandwidth=SLOW_BYTES_PER_SECOND,
            **{**settings, "maxBatchedTokens": PREFILL_TOKENS},
        )
        yield Pair(
            cluster, prefill, cluster.add_worker("decode", f"{transport}-decode-0", **settings)
        )


@pytest.fixture
def over(opened: Pair) -> Iterator[Pair]:
    """Both ready; a test may kill them."""
    opened.cluster.heal()
    yield opened
    opened.cluster.wait_settled()


def check_path(over: Pair, transport: str, reference: Reference, prompt: list[int]) -> None:
    """A remote prefill gives the right tokens, and its KV went by this transport."""
    before = over.decode.metrics()
    answer = over.decode.client.complete(prompt, "remote")
    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)
    over.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    for worker in (over.prefill, over.decode):
        assert worker.metrics().by_label("kv_transport_info", "transport") == {transport: 1}
    assert over.prefill.metrics().value("kv_transport_fallbacks_total") == 0


# T6
@pytest.mark.parametrize("num_tokens", [1, 17, 100])
def test_remote_prefill_gives_the_same_tokens(over, transport, prompts, reference, num_tokens):
    check_path(over, transport, reference, prompts(num_tokens))


# T12
def test_only_missing_blocks_are_written(over, prompts, reference):
    shared = prompts(5 * BLOCK)
    over.decode.client.complete(shared, "local", max_tokens=1)
    prompt, before = [*shared, *prompts(2 * BLOCK + 3)], over.decode.metrics()

    reference.check(prompt, over.decode.client.complete(prompt, "remote").tokens)
    over.decode.wait_growth(
        before, "kv_transfer_bytes_total", 3 * over.decode.block_bytes, direction="received"
    )


# T1, T10
@every_transport
def test_client_that_leaves_in_a_transfer_leaves_no_block(over, prompts):
    before = over.decode.metrics()
    with over.decode.client.stream(prompts(800), "remote", max_tokens=12) as stream:
        stream.read_tokens(1)
        over.decode.wait_for(lambda: over.decode.blocks()["receiving"] > 0, "the transfer goes on")
        assert stream.prefill == "remote"
    over.cluster.wait_settled()
    over.decode.wait_growth(before, "remote_prefill_total", 1, outcome="cancelled")


# T4
def test_frozen_writer_of_a_request_that_was_given_up_writes_into_no_block_of_others(
    over, transport, prompts, reference
):
    with ExitStack() as frozen:
        with over.decode.client.stream(prompts(800), "remote", max_tokens=12) as stream:
            stream.read_tokens(1)
            over.decode.wait_for(
                lambda: over.decode.blocks()["receiving"] > 0, "the transfer goes on"
            )
            frozen.enter_context(over.prefill.engine_stopped())
        # the client is gone: the blocks are free while their writer is frozen
        over.decode.wait_for(lambda: is_settled(over.decode), "the fence is answered")
        prompt = prompts(300)
        reference.check(prompt, over.decode.client.complete(prompt, "local").tokens)
    reference.check(prompt, over.decode.client.complete(prompt, "local").tokens)
    over.cluster.wait_settled()
    check_path(over, transport, reference, prompts(40))


# T2, T5
@every_transport
def test_prefill_worker_that_dies_in_a_transfer_is_used_again_once_it_is_back(
    over, transport, prompts, reference
):
    """Again and again at the same address; nothing of the last one is used, or kept."""
    used = []
    for _ in range(NUM_LIVES):
        prompt, before = prompts(800), over.decode.metrics()
        with over.decode.client.stream(prompt, "remote", max_tokens=12) as stream:
            first = list(stream.read_tokens(1))
            over.decode.wait_for(
                lambda: over.decode.blocks()["receiving"] > 0, "the transfer goes on"
            )
            over.prefill.kill()
            tokens = stream.read_all()

        assert (stream.prefill, stream.done, stream.error) == ("remote", True, None)
        assert (tokens[:1], len(tokens)) == (first, 12)
        reference.check(prompt, tokens)
        over.decode.wait_growth(before, "remote_prefill_total", 1, outcome="failed")
        over.cluster.wait_settled()
        over.cluster.heal()
        check_path(over, transport, reference, prompts(40))
        used.append(psutil.Process(over.decode.engine_pid).memory_info().rss)

    assert used[-1] - used[0] < MAX_GROWTH * (NUM_LIVES - 1)


# T3, T5
@every_transport
def test_decode_worker_that_dies_in_a_transfer_frees_the_blocks_of_the_other(
    over, transport, prompts, reference
):
    with over.decode.client.stream(prompts(800), "remote", max_tokens=12) as stream:
        stream.read_tokens(1)
        over.prefill.wait_for(
            lambda: over.prefill.blocks()["in_use"] > 0, "the prefill worker sends"
        )
        over.decode.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            stream.read_all()
    assert not stream.done

    over.cluster.wait_settled()  # of the prefill worker, the only one alive
    assert over.prefill.client.http.get("/ready").status_code == httpx.codes.OK
    over.cluster.heal()
    check_path(over, transport, reference, prompts(40))


# T11
def test_drain_lets_a_transfer_finish(over, prompts, reference):
    prompt, before = prompts(200), over.decode.metrics()
    with over.decode.client.stream(prompt, "remote", max_tokens=12) as stream:
        stream.read_tokens(1)
        over.decode.wait_for(lambda: over.decode.blocks()["receiving"] > 0, "the transfer goes on")
        over.prefill.terminate()
        tokens = stream.read_all()

    reference.check(prompt, tokens)
    over.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    assert over.prefill.wait_end() == 0


def test_threads_of_the_transport_do_not_spin(over):
    over.cluster.wait_settled()
    before = {worker: cpu_seconds(worker) for worker in (over.prefill, over.decode)}
    time.sleep(WINDOW_SECONDS)  # the window that is measured, not a wait for something

    for worker, used in before.items():
        assert cpu_seconds(worker) - used < MAX_SHARE * WINDOW_SECONDS
