"""T4, T9 and uninvited guests: dead epochs, mismatched peers, garbage, and a peer outside the
cluster's CA.
"""

import contextlib
import os
import socket
from contextlib import closing

import grpc
import httpx
import pytest

from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.peers.calls import CHANNEL_OPTIONS, WorkerStub
from tests.reference import Reference
from tests.system.certificates import make_certificates
from tests.system.client import Json, body
from tests.system.cluster import Cluster, Pair
from tests.system.kv_port import HEADS, SOCKET_SECONDS, connect, receive
from tests.system.prompts import Prompts
from tests.system.worker_process import WorkerProcess


def check_still_works(pair: Pair, prompts: Prompts, reference: Reference) -> None:
    prompt = prompts(40)
    answer = pair.decode.client.complete(prompt, "remote")
    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)


# T4
def test_write_under_an_unknown_epoch_is_refused(pair, prompts, reference):
    before, block = pair.decode.metrics(), os.urandom(pair.decode.block_bytes)
    with connect(pair.decode.record["kv_address"]) as sock:
        sock.sendall(wire.encode_hello(wire.KvHello(pair.decode.record["engine_id"])))
        assert receive(sock, wire.decode_reply) == wire.Reply(None)
        for _ in range(2):  # the connection goes on after a refusal
            epoch = os.urandom(16)
            sock.sendall(
                wire.encode_header(wire.Header(epoch, HEADS, (0, 1), 2 * len(block)))
                + block
                + block
            )
            ack = receive(sock, wire.decode_ack)
            assert ack.epoch == epoch
            assert ack.refusal is not None

    check_still_works(pair, prompts, reference)
    # of the check alone
    assert (
        pair.decode.growth(before, "kv_transfer_bytes_total", direction="received")
        == 3 * pair.decode.block_bytes
    )


@pytest.mark.parametrize("port", ["kv", "grpc", "http"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_garbage_closes_that_connection_only(pair, prompts, reference, port, role):
    worker: WorkerProcess = getattr(pair, role)
    for garbage in (b"\x80\x04\x95pickle" + os.urandom(4096), b"\x00" * 64, b"GET / HTTP/1.1\r\n"):
        with connect(worker.record[f"{port}_address"]) as sock:
            sock.sendall(garbage)
            # the worker may have closed it by now, and may reset it
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    assert worker.is_alive
    check_still_works(pair, prompts, reference)


def test_peer_outside_the_ca_is_refused(pair, tmp_path, certificates):
    stranger = make_certificates(tmp_path / "stranger")
    no_certificate = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    wrong_certificate = grpc.ssl_channel_credentials(
        certificates.ca.read_bytes(), stranger.key.read_bytes(), stranger.certificate.read_bytes()
    )
    for credentials in (no_certificate, wrong_certificate):
        with closing(
            grpc.secure_channel(
                pair.decode.record["grpc_address"], credentials, options=CHANNEL_OPTIONS
            )
        ) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                WorkerStub(channel).handshake(b"", timeout=SOCKET_SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with (
        closing(grpc.insecure_channel(pair.decode.record["grpc_address"])) as channel,
        pytest.raises(grpc.RpcError),
    ):
        WorkerStub(channel).handshake(b"", timeout=SOCKET_SECONDS)


def test_mismatched_prefill_workers_are_refused_as_pairs(
    new_cluster, other_model, prompts, reference
):  # T9
    cluster = new_cluster("mismatch")
    decode = cluster.add_worker("decode", "decode-0")
    # what `auto` is in this revision
    cluster.etcd.put("/pdcluster/test/mismatch/dtypes/r1", "bfloat16")
    strange = cluster.add_worker("prefill", "prefill-dtype", start=False)
    strange.settings["model"]["dtype"] = "auto"
    strange.start()
    other = cluster.add_worker("prefill", "prefill-weights", model=other_model)
    for worker in (decode, strange, other):
        worker.wait_ready()
    decode.wait_for(
        lambda: decode.metrics().value("peers", role="prefill", state="refused") == 2,
        "both pairs are refused",
    )

    refused = decode.metrics().by_label("peer_refused_total", "reason")
    assert {reason: count for reason, count in refused.items() if count} == {
        "kv_geometry": 1,
        "weights": 1,
    }
    assert "dtype is float32 here and bfloat16 at the peer; set model.dtype" in decode.log_tail()
    assert "weights fingerprint" in decode.log_tail()
    prompt = prompts(300)
    answer = decode.client.complete(prompt, "auto")
    assert answer.prefill == "local"
    reference.check(prompt, answer.tokens)
    # The operator reads from the record what the decode worker found.
    decode.wait_for(
        lambda: _stated(cluster)["num_refused"] == 2 and _stated(cluster)["long_prompts"] == 1,
        lambda: _stated(cluster),
    )
    reasons = {peer["pod"]: peer["reason"] for peer in _stated(cluster)["refused"]}
    assert set(reasons) == {"prefill-dtype", "prefill-weights"}
    assert (
        "dtype is float32 here and bfloat16 at the peer; set model.dtype"
        in reasons["prefill-dtype"]
    )
    assert (_stated(cluster)["transport"], _stated(cluster)["remote_ratio"]) == ("tcp", 0.0)
    assert decode.metrics().by_label("long_prompts_total", "prefill") == {"remote": 0, "local": 1}
    assert decode.metrics().value("kv_transport_info", transport="tcp") == 1
    assert decode.metrics().value("engine_dtype_info", dtype="float32", native="true") == 1
    assert strange.metrics().by_label("engine_dtype_info", "dtype") == {"bfloat16": 1}
    assert decode.client.post(body(prompt, "remote")).status_code == httpx.codes.SERVICE_UNAVAILABLE
    for worker in (decode, strange, other):
        assert worker.client.http.get("/ready").status_code == httpx.codes.OK
    cluster.wait_settled()


def _stated(cluster: Cluster) -> Json:
    record = cluster.record("decode-0")
    assert record is not None
    stated: Json = record["disaggregation"]
    return stated
