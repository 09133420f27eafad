"""T2 and T5: a prefill worker that is killed before the first token, and a worker that comes back
at the same address.

Those that are killed in the middle of a transfer, T2 and T3: tests/system/test_transports.
"""

import queue
import threading
from typing import cast

import grpc
import httpx
import msgspec
import pytest

from pdcluster_worker.messages.peers import (
    CallEnd,
    CallFailure,
    PrefillCall,
    SubmitCall,
    decode_replies,
    encode,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget
from pdcluster_worker.peers.calls import CHANNEL_OPTIONS, WorkerStub
from tests.system.certificates import Certificates
from tests.system.client import answer_of, body
from tests.system.worker_process import WorkerProcess


@pytest.mark.parametrize("prefill", ["auto", "remote"])
# T2
def test_prefill_killed_before_the_first_token(slow, prompts, reference, prefill):
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


# T5
def test_prefill_back_at_the_same_address_is_used_again(pair, prompts, reference):
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
def test_decode_back_at_the_same_address_is_served_again(pair, prompts, reference):
    pair.decode.kill()
    pair.decode.restart()
    pair.cluster.wait_connected()

    prompt = prompts(100)
    answer = pair.decode.client.complete(prompt, "remote")
    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)


# T5
def test_calls_for_an_old_engine_are_refused(pair, certificates, prompts):
    status = _prefill_for(pair.prefill, "0" * 32, certificates, prompts(20))
    failure = _generate_for(pair.decode, "0" * 32, certificates, prompts(20))

    assert status.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert pair.prefill.record["engine_id"] in status.details()
    assert failure.message.startswith("FAILED_PRECONDITION")
    assert pair.decode.record["engine_id"] in failure.message


def _generate_for(
    worker: WorkerProcess, engine_id: str, certificates: Certificates, prompt: list[int]
) -> CallFailure:
    spec = encode(RequestSpec("r", prompt, SamplingParams(max_tokens=4, seed=0)))
    requested: queue.Queue[bytes | None] = queue.Queue()  # the stream is open until it is answered
    requested.put(encode([SubmitCall(0, engine_id, "local", msgspec.Raw(spec))]))
    with grpc.secure_channel(
        worker.record["grpc_address"], certificates.channel(), options=CHANNEL_OPTIONS
    ) as channel:
        answers = WorkerStub(channel).generate(iter(requested.get, None), timeout=10)
        over = decode_replies(next(iter(answers)))[0]
        requested.put(None)
    assert isinstance(over, CallEnd)
    assert over.failure is not None
    return over.failure


def _prefill_for(
    worker: WorkerProcess, engine_id: str, certificates: Certificates, prompt: list[int]
) -> grpc.Call:
    spec = RequestSpec("r", prompt, SamplingParams(max_tokens=4, seed=0))
    target = TransferTarget(bytes(16), "d", ["127.0.0.1:1"], 0, [0, 1])
    message = encode(PrefillCall(spec, engine_id, target))
    address = worker.record["grpc_address"]
    with (
        grpc.secure_channel(address, certificates.channel(), options=CHANNEL_OPTIONS) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(WorkerStub(channel).prefill(message, timeout=10))
    return cast(grpc.Call, caught.value)
