"""The KV port against peers that lie, stall, break off or speak something else: raw sockets, real
receiver.
"""

import os

import pytest

from pdcluster_worker.engine.ports import Fenced
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer import wire


@pytest.fixture
def decode(tcp_engine):
    return tcp_engine("decode", verify=True)


@pytest.fixture
def connect(decode, raw_peer):
    return lambda: raw_peer(decode)


def payload_for(engine, num_blocks):
    return os.urandom(engine.memory.block_bytes * num_blocks)


def test_frame_lands_whole_in_its_blocks(decode, connect, epoch):
    decode.transport.open(epoch, [4, 2])
    peer, payload = connect(), payload_for(decode, 2)
    assert peer.hello() == wire.Reply(None)
    assert peer.frame(epoch, [4, 2], payload) == wire.Ack(epoch, None)
    assert bytes(decode.memory.block(4)) + bytes(decode.memory.block(2)) == payload


def test_hello_to_another_engine_is_refused_and_closed(connect):
    peer = connect()
    # and not which
    assert peer.hello("decode-before-restart").refusal == "another engine listens here"
    assert peer.is_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95" + bytes(40),
        bytes(4096),
        b"PDCKV\r\n\x00\x00\x01\x00\x01d",
        b"PDCKV\r\n\x00\x00\x02\xff\xff",
    ],
)
def test_garbage_before_hello_closes_that_connection_alone(
    decode, connect, wait_until, epoch, garbage
):
    good, bad = connect(), connect()
    good.hello()
    bad.sock.sendall(garbage)
    assert bad.is_closed()
    wait_until(lambda: decode.transport.own.num_bad_connections == 1)
    decode.transport.open(epoch, [1])
    assert good.frame(epoch, [1], payload_for(decode, 1)).refusal is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xa5" * 64,
        b"KVFR" + bytes(19) + b"\x01" + b"\xff" * 8 + b"\x00\x00\x00\x01" + bytes(64),
        b"KVFR" + bytes(19) + b"\x01" + bytes(8) + b"\xff\xff\xff\xff" + bytes(64),
    ],
)
def test_garbage_instead_of_a_frame_closes_that_connection_alone(
    decode, connect, wait_until, garbage
):
    bad = connect()
    bad.hello()
    bad.sock.sendall(garbage)
    assert bad.is_closed()
    wait_until(lambda: decode.transport.own.num_bad_connections == 1)
    assert connect().hello().refusal is None


@pytest.mark.parametrize("truncated", [b"PDCKV", wire.encode_hello(wire.KvHello("decode"))[:-1]])
def test_broken_off_hello_is_counted(decode, connect, wait_until, truncated):
    peer = connect()
    peer.sock.sendall(truncated)
    peer.sock.close()
    wait_until(lambda: decode.transport.own.num_bad_connections == 1)


@pytest.mark.parametrize(
    ("block_ids", "num_bytes", "reason"),
    [
        ([1], 4095, "a block has 4096 bytes, not 4095 for 1 blocks"),
        ([1, 2], 4096, "a block has 4096 bytes, not 4096 for 2 blocks"),
        ([7], 4096, "block 7 is not open under this epoch"),
        ([4_000_000_000], 4096, "block 4000000000 is not open under this epoch"),
        ([1, 1], 8192, "block 1 was already written"),
        ([2], 4096, "block 2 is out of order"),
        ([1, 2, 3], 12288, "block 3 is not open under this epoch"),
    ],
)
def test_wrong_frame_is_refused_writes_nothing_and_the_connection_goes_on(
    decode, connect, epoch, block_ids, num_bytes, reason
):
    decode.transport.open(epoch, [1, 2])
    before = [bytes(decode.memory.block(block)) for block in range(16)]
    peer = connect()
    peer.hello()
    assert peer.frame(epoch, block_ids, os.urandom(num_bytes)) == wire.Ack(epoch, reason)
    assert [decode.memory.block(block) for block in range(16)] == before
    payload = payload_for(decode, 2)
    assert peer.frame(epoch, [1, 2], payload).refusal is None
    assert peer.frame(epoch, [1], payload[:4096]).refusal == "block 1 was already written"
    assert peer.frame(os.urandom(16), [1], payload_for(decode, 1)).refusal == "dead epoch"
    assert bytes(decode.memory.block(1)) == payload[:4096]


def test_fence_does_not_wait_for_a_peer_that_stalls_within_a_frame(
    decode, connect, wait_until, epoch
):
    decode.transport.open(epoch, [1, 2, 3])
    peer, payload = connect(), payload_for(decode, 3)
    peer.hello()
    peer.header(epoch, [1, 2, 3])
    peer.sock.sendall(payload[:5000])
    wait_until(lambda: bytes(decode.memory.block(2))[:904] == payload[4096:5000])
    decode.transport.fence(epoch)
    assert decode.wait_for(Fenced) == [Fenced(epoch, frozenset({1}), 4096, None)]
    after = [bytes(decode.memory.block(block)) for block in range(16)]
    new_epoch = os.urandom(16)
    # the blocks have a new owner; what is left of the frame comes now
    decode.transport.open(new_epoch, [2])
    peer.sock.sendall(payload[5000:])
    assert peer.read(wire.decode_ack) == wire.Ack(epoch, "dead epoch")
    assert [decode.memory.block(block) for block in range(16)] == after
    # other transfers on this connection go on
    reply = peer.frame(new_epoch, [2], payload_for(decode, 1))
    assert reply.refusal is None


def test_peer_killed_within_a_frame_leaves_its_block_missing_and_the_fence_returns(
    decode, connect, wait_until, epoch
):
    decode.transport.open(epoch, [1, 2])
    peer, payload = connect(), payload_for(decode, 2)
    peer.hello()
    peer.header(epoch, [1, 2])
    peer.sock.sendall(payload[:6000])
    wait_until(lambda: bytes(decode.memory.block(2))[:1904] == payload[4096:6000])
    peer.sock.close()
    decode.transport.fence(epoch)
    assert decode.wait_for(Fenced) == [Fenced(epoch, frozenset({1}), 4096, None)]


def test_close_breaks_connections_and_frees_the_port(decode, connect, tcp_engine, epoch):
    decode.transport.open(epoch, [1])
    peer = connect()
    peer.hello()
    peer.header(epoch, [1])
    port = decode.transport.ports[0]
    decode.transport.close()
    assert peer.is_closed()
    assert tcp_engine("decode-2", port=port).transport.ports[0] == port


def test_port_that_is_taken_is_a_config_error(decode, tcp_engine):
    with pytest.raises(ConfigError, match=r"already in use: choose another listen\.kv"):
        tcp_engine("decode-2", port=decode.transport.ports[0])
