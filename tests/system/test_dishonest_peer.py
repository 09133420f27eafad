"""T4 and broken hand-overs against a real decode worker whose prefill worker is scripted: no block
is written late, no answer is wrong.
"""

import threading
from collections.abc import Iterator

import pytest

from tests.system.certificates import Certificates
from tests.system.client import Answer, Stream
from tests.system.cluster import Cluster, NewCluster
from tests.system.fake_prefill import FakePrefill
from tests.system.kv_port import write_blocks
from tests.system.worker_process import WorkerProcess

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def lone_cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("lone") as cluster:
        cluster.add_worker("decode", "decode-0", numBlocks=NUM_BLOCKS, verifyTransfers=True)
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def decode(lone_cluster: Cluster) -> Iterator[WorkerProcess]:
    """A decode worker without a prefill worker of its own."""
    yield lone_cluster.workers["decode-0"]
    lone_cluster.wait_settled()


@pytest.fixture
def fake(
    lone_cluster: Cluster, decode: WorkerProcess, certificates: Certificates
) -> Iterator[FakePrefill]:
    with FakePrefill(lone_cluster, certificates, decode.record) as fake:
        decode.wait_for(
            lambda: decode.metrics().value("peers", role="prefill", state="ready") == 1,
            "the pair is made",
        )
        yield fake


class DishonestCaller(threading.Thread):
    """A request in the background."""

    def __init__(self, decode: WorkerProcess, prompt: list[int], prefill: str) -> None:
        super().__init__()
        self.answer: Answer | None = None
        self._decode, self._prompt, self._prefill = decode, prompt, prefill
        self.start()

    def run(self) -> None:
        self.answer = self._decode.client.complete(self._prompt, self._prefill)

    def result(self) -> Answer:
        self.join()
        assert self.answer is not None
        return self.answer


@pytest.mark.parametrize("begins", [False, True], ids=["before", "after"])
def test_peer_that_never_makes_progress_is_given_up(decode, fake, prompts, reference, begins):
    """Before or after the first token; its server answers pings all the time."""
    prompt, before = prompts(100), decode.metrics()
    decode.take_policy({"stallSeconds": 1, "offload": {"prefillLengthThreshold": 64}})
    try:
        asker = DishonestCaller(decode, prompt, "remote" if begins else "auto")
        call = fake.next_call()
        if begins:
            call.first_token(reference.greedy(prompt, 1)[0])
        answer = asker.result()
    finally:
        decode.take_policy({})

    assert answer.prefill == ("remote" if begins else "local")
    reference.check(prompt, answer.tokens)
    decode.wait_for(lambda: call.cancelled, "the call is cancelled")
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="stalled")
    decode.wait_for(
        lambda: decode.blocks()["quarantined"] + decode.blocks()["receiving"] == 0,
        "the epoch is fenced",
    )


def test_write_after_the_epoch_ended_is_refused(decode, fake, prompts, reference):  # T4
    before = decode.metrics()
    with decode.client.unread(prompts(100), "remote"):
        call = fake.next_call()
        assert decode.blocks()["receiving"] == 7
    decode.wait_for(lambda: call.cancelled, "both legs are cancelled")
    decode.wait_for(
        lambda: decode.blocks()["quarantined"] + decode.blocks()["receiving"] == 0,
        "the epoch is fenced",
    )

    # Its blocks belong to another request by now, whose KV must stay its own.
    prompt = prompts(NUM_BLOCKS * 16 - 100)
    with decode.client.stream(prompt, "local", max_tokens=40) as stream:
        stream.read_tokens(5)
        refusals = write_blocks(
            call.prefill.target, call.prefill.target.block_ids, decode.block_bytes
        )
        tokens = stream.read_all()

    assert len(refusals) == 7
    assert None not in refusals
    reference.check(prompt, tokens)
    assert decode.growth(before, "kv_transfer_bytes_total", direction="received") == 0


@pytest.mark.parametrize("num_written", [0, 2])
def test_claim_of_blocks_that_never_came_means_local_prefill(
    decode, fake, prompts, reference, num_written
):
    prompt = prompts(60)
    asker = DishonestCaller(decode, prompt, "remote")
    call = fake.next_call()
    (first,) = reference.greedy(prompt, 1)
    call.first_token(first)
    target = call.prefill.target
    assert (
        write_blocks(target, target.block_ids[:num_written], decode.block_bytes)
        == [None] * num_written
    )
    call.finish()

    answer = asker.result()
    assert answer.prefill == "remote"  # where the first token was made
    reference.check(prompt, answer.tokens)


def test_blocks_that_differ_from_their_checksum_mean_local_prefill(
    decode, fake, prompts, reference
):
    prompt = prompts(60)
    asker = DishonestCaller(decode, prompt, "remote")
    call = fake.next_call()
    call.first_token(reference.greedy(prompt, 1)[0])
    assert (
        write_blocks(call.prefill.target, call.prefill.target.block_ids, decode.block_bytes)
        == [None] * 4
    )
    call.finish(checksum=1)

    reference.check(prompt, asker.result().tokens)


def test_call_that_breaks_off_means_local_prefill(decode, fake, prompts, reference):
    before, prompt = decode.metrics(), prompts(60)
    asker = DishonestCaller(decode, prompt, "remote")
    call = fake.next_call()
    call.first_token(reference.greedy(prompt, 1)[0])
    call.replies.put(None)

    reference.check(prompt, asker.result().tokens)
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="failed")


def test_first_token_reaches_the_client_before_the_kv(decode, fake, prompts, reference):
    prompt = prompts(60)
    streams: list[Stream] = []
    seen = threading.Event()

    def read() -> None:
        with decode.client.stream(prompt, "remote") as stream:
            streams.append(stream)
            stream.read_tokens(1)
            seen.set()
            stream.read_all()

    reader = threading.Thread(target=read)
    reader.start()
    call = fake.next_call()
    call.first_token(reference.greedy(prompt, 1)[0])
    assert seen.wait(20)
    assert decode.blocks()["receiving"] == 4
    call.replies.put(None)
    reader.join()

    reference.check(prompt, streams[0].tokens)
