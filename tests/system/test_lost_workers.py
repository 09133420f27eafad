"""T2, T3 and T5: a worker that is killed in the middle of a transfer, and one that comes back at
the same address.
"""

import threading
from typing import cast

import grpc
import httpx
import pytest

from pdcluster_worker.peers.options import CHANNEL_OPTIONS
from pdcluster_worker.proto import worker_pb2 as pb
from pdcluster_worker.proto.worker_pb2_grpc import WorkerStub
from tests.reference import Reference
from tests.system.certificates import Certificates
from tests.system.client import answer_of, body
from tests.system.cluster import Pair
from tests.system.prompts import Prompts
from tests.system.worker_process import WorkerProcess


# T2
def test_prefill_killed_after_the_first_token_keeps_it_and_goes_on(
    slow: Pair, prompts: Prompts, reference: Reference
) -> None:
    prompt = prompts(800)
    before = slow.decode.metrics()
    with slow.decode.client.stream(prompt, "remote", max_tokens=12) as stream:
        first = list(stream.read_tokens(1))
        slow.decode.wait_for(lambda: slow.decode.blocks()["receiving"] > 0, "the transfer goes on")
        slow.prefill.kill()
        tokens = stream.read_all()

    assert (stream.prefill, stream.done, stream.error) == ("remote", True, None)
    assert tokens[:1] == first
    assert len(tokens) == 12
    reference.check(prompt, tokens)
    slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="failed")
    slow.cluster.wait_settled()


@pytest.mark.parametrize("prefill", ["auto", "remote"])
# T2
def test_prefill_killed_before_the_first_token(
    slow: Pair, prompts: Prompts, reference: Reference, prefill: str
) -> None:
    prompt = prompts(1500)
    before = slow.decode.metrics()
    replies: list[httpx.Response] = []
    asker = threading.Thread(
        target=lambda: replies.append(slow.decode.client.post(body(prompt, prefill)))
    )
    asker.start()
    try:
        slow.prefill.wait_for(
            lambda: slow.prefill.blocks()["in_use"] > 0, "the prefill worker has begun"
        )
        slow.prefill.kill()
    finally:
        asker.join()

    (reply,) = replies
    if prefill == "remote":
        assert reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert reply.json()["error"]["code"] == "prefill_failed"
    else:
        assert reply.headers["x-pdcluster-prefill"] == "local"
        reference.check(prompt, answer_of(reply).tokens)
    slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="failed")
    slow.cluster.wait_settled()


# T3
def test_decode_killed_while_prefill_sends_frees_its_blocks(slow: Pair, prompts: Prompts) -> None:
    with slow.decode.client.stream(prompts(800), "remote", max_tokens=12) as stream:
        stream.read_tokens(1)
        slow.prefill.wait_for(
            lambda: slow.prefill.blocks()["in_use"] > 0, "the prefill worker sends"
        )
        slow.decode.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            stream.read_all()
    assert not stream.done

    slow.cluster.wait_settled()  # of the prefill worker, the only one alive
    assert slow.prefill.client.http.get("/ready").status_code == httpx.codes.OK


# T5
def test_prefill_back_at_the_same_address_is_used_again(
    pair: Pair, prompts: Prompts, reference: Reference
) -> None:
    old = pair.prefill.record
    pair.prefill.kill()
    pair.prefill.restart()
    pair.cluster.wait_connected()
    new = pair.prefill.record

    assert new["engine_id"] != old["engine_id"]
    assert [new[f"{kind}_address"] for kind in ("http", "grpc", "kv")] == [
        old[f"{kind}_address"] for kind in ("http", "grpc", "kv")
    ]
    prompt = prompts(100)
    answer = pair.decode.client.complete(prompt, "remote")
    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)


# T5
def test_decode_back_at_the_same_address_is_served_again(
    pair: Pair, prompts: Prompts, reference: Reference
) -> None:
    pair.decode.kill()
    pair.decode.restart()
    pair.cluster.wait_connected()

    prompt = prompts(100)
    answer = pair.decode.client.complete(prompt, "remote")
    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)


# T5
def test_calls_for_an_old_engine_are_refused(
    pair: Pair, certificates: Certificates, prompts: Prompts
) -> None:
    for worker, call in ((pair.prefill, "Prefill"), (pair.decode, "Generate")):
        status = _call_for(worker, call, "0" * 32, certificates, prompts(20))

        assert status.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert worker.record["engine_id"] in status.details()


def _call_for(
    worker: WorkerProcess, call: str, engine_id: str, certificates: Certificates, prompt: list[int]
) -> grpc.Call:
    """End of a call that names that engine."""
    request = pb.Request(
        request_id="r",
        prompt=prompt,
        sampling=pb.Sampling(max_tokens=4, repetition_penalty=1, top_p=1),
    )
    target = pb.Target(epoch=bytes(16), engine_id="d", addresses=["127.0.0.1:1"], block_ids=[0, 1])
    messages = {
        "Prefill": pb.PrefillRequest(request=request, engine_id=engine_id, target=target),
        "Generate": pb.GenerateRequest(request=request, engine_id=engine_id, prefill="local"),
    }
    address = worker.record["grpc_address"]
    with (
        grpc.secure_channel(address, certificates.channel(), options=CHANNEL_OPTIONS) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(getattr(WorkerStub(channel), call)(messages[call], timeout=10))
    return cast(grpc.Call, caught.value)
