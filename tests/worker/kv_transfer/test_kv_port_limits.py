"""Limits of the KV port for connections without a hello, silent ones and many: raw sockets, real
receiver, short limits.
"""

import os
import resource

import pytest

from pdcluster_worker.engine.ports import Fenced, SendEnded
from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.tcp_inbound import PortLimits
from pdcluster_worker.kv_transfer.tcp_link import LinkSettings
from pdcluster_worker.kv_transfer.tcp_receiver import ConnectionLimiter

SOON = 0.05
PACE_SECONDS = 0.02
MIB = 1 << 20


def drip(peer, data):
    """Send byte by byte; True if the other side closed before the last one."""
    peer.sock.settimeout(PACE_SECONDS)
    for byte in data:
        try:
            peer.sock.sendall(bytes([byte]))
            if peer.sock.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def test_stranger_learns_no_engine_id_and_bytes_that_are_no_hello_get_no_answer(
    tcp_engine, raw_peer
):
    decode = tcp_engine("secret-of-this-start")
    guess, garbage = raw_peer(decode), raw_peer(decode)
    reply = guess.hello("secret-of-another")
    garbage.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert "secret" not in reply.refusal
    assert guess.is_closed()
    assert garbage.is_closed()


def test_connection_without_a_hello_is_closed(tcp_engine, raw_peer):
    assert raw_peer(tcp_engine("decode", limits=PortLimits(hello_seconds=SOON))).is_closed()


def test_hello_that_drips_is_closed_at_the_deadline_of_the_whole(tcp_engine, raw_peer):
    decode = tcp_engine("d" * 250, limits=PortLimits(hello_seconds=0.5))

    assert drip(raw_peer(decode), wire.encode_hello(wire.KvHello("d" * 250)))


def test_idle_connection_is_closed_after_its_hello(tcp_engine, raw_peer):
    peer = raw_peer(tcp_engine("decode", limits=PortLimits(idle_seconds=SOON)))

    assert peer.hello().refusal is None
    assert peer.is_closed()


def test_header_that_drips_is_closed_at_the_deadline_of_the_whole(tcp_engine, raw_peer, epoch):
    decode = tcp_engine("decode", limits=PortLimits(idle_seconds=0.5))
    peer = raw_peer(decode)
    peer.hello()

    assert drip(
        peer,
        wire.encode_header(
            wire.Header(epoch, range(1), tuple(range(256)), 256 * decode.memory.block_bytes)
        ),
    )


@pytest.mark.parametrize("is_open", [True, False])
def test_sender_that_falls_silent_within_a_frame_is_closed(tcp_engine, raw_peer, epoch, is_open):
    decode = tcp_engine("decode", limits=PortLimits(idle_seconds=0.2))
    if is_open:
        decode.transport.open(epoch, [1, 2])
    peer = raw_peer(decode)
    peer.hello()
    peer.header(epoch, [1, 2])
    peer.sock.sendall(os.urandom(5000))
    assert peer.is_closed()
    decode.transport.fence(epoch)

    assert decode.wait_for(Fenced)[0].received == ({1} if is_open else set())


def test_limit_of_one_address_leaves_room_for_others_and_seats_come_back(
    tcp_engine, raw_peer, wait_until
):
    decode = tcp_engine("decode", limits=PortLimits(max_per_address=2))
    held = [raw_peer(decode), raw_peer(decode)]
    assert [peer.hello().refusal for peer in held] == [None, None]

    assert raw_peer(decode).hello().refusal == "2 are open from its address, the limit of one"
    assert raw_peer(decode, source="127.0.0.2").hello().refusal is None
    held[1].sock.close()
    wait_until(lambda: greets(raw_peer(decode)))


def test_silent_connections_of_one_address_take_no_seats_of_others(tcp_engine, raw_peer):
    decode = tcp_engine(
        "decode", limits=PortLimits(max_connections=1, max_unauthenticated_per_address=2)
    )
    silent = [raw_peer(decode), raw_peer(decode)]

    assert raw_peer(decode).is_closed()
    assert raw_peer(decode, source="127.0.0.2").hello().refusal is None
    assert silent[0].hello().refusal == "1 are open, the limit"


def test_crowd_of_silent_connections_does_not_shut_the_port(tcp_engine, raw_peer):
    decode = tcp_engine("decode", limits=PortLimits(max_unauthenticated=3, max_connections=2))
    peer = raw_peer(decode)
    peer.hello()
    silent = [raw_peer(decode, source=f"127.0.0.{n}") for n in range(2, 12)]

    assert raw_peer(decode).hello().refusal is None
    assert all(stranger.is_closed() for stranger in silent[:-3])
    assert peer.frame(os.urandom(16), [1], bytes(peer.block_bytes)).refusal == "dead epoch"


def test_open_file_limit_bounds_the_seats(tcp_engine, raw_peer, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256 + 128 + 1, 1024))
    decode = tcp_engine("decode")

    assert raw_peer(decode).hello().refusal is None
    assert raw_peer(decode).hello().refusal == "1 are open, the limit"


def greets(peer):
    """True if this connection has a seat; the socket is closed if not."""
    try:
        return peer.hello().refusal is None
    except (AssertionError, ConnectionError):
        return False


def test_connections_over_the_limit_are_closed_and_the_log_does_not_grow_with_each(
    tcp_engine, raw_peer, caplog
):
    decode = tcp_engine("decode", limits=PortLimits(max_connections=1))
    raw_peer(decode).hello()
    for _ in range(20):
        late = raw_peer(decode, source="127.0.0.2")
        assert late.hello().refusal == "1 are open, the limit"
        assert late.is_closed()

    lines = [record for record in caplog.records if "refused a KV connection" in record.message]
    # at most one a second, and twenty connections take far less than 20 s
    assert 1 <= len(lines) < 20
    assert "1 are open, the limit" in lines[0].message


def test_seats_are_counted_by_address_and_apart_for_strangers():
    closed = []
    limits = PortLimits(
        max_connections=2,
        max_per_address=1,
        max_unauthenticated=3,
        max_unauthenticated_per_address=2,
    )
    seats = ConnectionLimiter[int](limits, closed.append)

    assert [seats.take(1, "a"), seats.take(2, "a")] == [None, None]
    assert seats.take(3, "a") == "2 without a hello are open from its address, the limit of one"
    assert seats.authenticate(1) is None
    assert seats.authenticate(2) == "1 are open from its address, the limit of one"
    assert [seats.take(4, "b"), seats.take(5, "b"), seats.take(6, "c")] == [None] * 3
    assert closed == [2]
    assert seats.authenticate(2) == "its place was given to a new connection"
    assert seats.authenticate(4) is None
    assert seats.authenticate(6) == "2 are open, the limit"
    seats.leave(1)
    assert seats.authenticate(6) is None


@pytest.mark.parametrize("payload_bytes", [2 * MIB + 1, wire.MAX_PAYLOAD_BYTES])
def test_frame_larger_than_any_sender_makes_is_not_read(
    tcp_engine, raw_peer, wait_until, epoch, payload_bytes
):
    decode = tcp_engine("decode")
    peer = raw_peer(decode)
    peer.hello()
    peer.header(epoch, [1], payload_bytes)

    assert peer.is_closed()
    wait_until(lambda: decode.transport.own.num_bad_connections == 1)


@pytest.mark.parametrize(("block_bytes", "num_blocks"), [(MIB, 2), (3 * MIB, 1)])
def test_largest_frame_of_a_dead_epoch_is_read_away_and_the_connection_goes_on(
    tcp_engine, raw_peer, epoch, block_bytes, num_blocks
):
    decode = tcp_engine("decode", block_bytes=block_bytes, num_blocks=4)
    peer = raw_peer(decode)
    peer.hello()
    blocks = list(range(num_blocks))
    assert peer.frame(epoch, blocks, bytes(num_blocks * block_bytes)).refusal == "dead epoch"
    decode.transport.open(epoch, blocks)

    assert peer.frame(epoch, blocks, bytes(num_blocks * block_bytes)).refusal is None


def test_other_transfers_of_a_link_lose_nothing_when_one_epoch_is_closed(tcp_engine):
    prefill, decode = (
        tcp_engine(name, block_bytes=MIB, num_blocks=40) for name in ("prefill", "decode")
    )
    epochs = [os.urandom(16) for _ in range(4)]
    for n, epoch in enumerate(epochs):
        decode.transport.open(epoch, range(10 * n, 10 * n + 10))
    decode.transport.fence(epochs[1])  # its sender does not know
    for n, epoch in enumerate(epochs):
        prefill.write(epoch, decode, [(block, block) for block in range(10 * n, 10 * n + 10)])
    prefill.wait_sent(30)

    assert [event for event in prefill.events if isinstance(event, SendEnded)] == [
        SendEnded(epochs[1], "refused: dead epoch")
    ]
    assert all(
        decode.memory.block(block) == prefill.memory.block(block)
        for block in (*range(10), *range(20, 40))
    )


def test_senders_leave_long_before_the_port_closes_an_idle_connection():
    assert (
        LinkSettings.__dataclass_fields__["idle_seconds"].default * 2 <= PortLimits().idle_seconds
    )
