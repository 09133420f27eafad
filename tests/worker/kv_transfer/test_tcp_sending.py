"""The sending side against peers that are dead, deaf, slow or wrong; the peers are raw sockets or
real transports.
"""

import os
import socket
import threading
from functools import partial

import pytest

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded, TransferRoute
from pdcluster_worker.kv_transfer import tcp, wire
from pdcluster_worker.kv_transfer.tcp_link import LinkSettings
from tests.worker.kv_transfer.conftest import ByteMemory, read

BIG = 1 << 20  # a block that with its neighbours overflows every kernel buffer between the two
MANY = 24


class RawReceiver:
    """A listening socket that plays the receiver by hand."""

    engine_id = "decode"

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.socks = []

    def accept(self, refusal=None):
        sock, _ = self.listener.accept()
        sock.settimeout(20)
        self.socks.append(sock)
        hello = read(sock, wire.decode_hello)
        sock.sendall(wire.encode_reply(wire.Reply(refusal)))
        assert hello == wire.KvHello(self.engine_id)
        return sock

    def close(self):
        for sock in (self.listener, *self.socks):
            sock.close()


def take_frame(sock):
    header = read(sock, wire.decode_request)
    payload = b""
    while len(payload) < header.payload_bytes:
        payload += sock.recv(header.payload_bytes - len(payload))
    return header, payload


def acknowledge(sock, epoch, refusal=None):
    sock.sendall(wire.encode_ack(wire.Ack(epoch, refusal)))


def serve_one(receiver, sender, num_sent=1):
    """A connection with one frame, which is taken and acknowledged."""
    sock = receiver.accept()
    header, _ = take_frame(sock)
    acknowledge(sock, header.epoch)
    sender.wait_sent(num_sent)
    return sock


@pytest.fixture
def receiver():
    peer = RawReceiver()
    yield peer
    peer.close()


@pytest.fixture
def write():
    """Queue writes to a RawReceiver."""

    def to(engine, epoch, receiver, pairs):
        engine.transport.write(epoch, receiver.engine_id, [receiver.address], pairs)

    return to


def test_contiguous_writes_travel_in_one_frame_and_are_pipelined(
    tcp_engine, receiver, write, epoch
):
    prefill = tcp_engine("prefill", block_bytes=BIG)
    write(prefill, epoch, receiver, [(i, i + 4) for i in range(4)])
    sock = receiver.accept()
    # the second does not wait for the first's ack
    (first, payload), (second, _) = take_frame(sock), take_frame(sock)
    assert (first.block_ids, second.block_ids) == ((4, 5), (6, 7))
    assert payload == bytes(prefill.memory.block(0)) + bytes(prefill.memory.block(1))
    acknowledge(sock, epoch)
    prefill.wait_sent(2)
    acknowledge(sock, epoch)
    assert prefill.wait_for(BlocksSent, 2) == [
        BlocksSent(epoch, (0, 1), 2 * BIG, at=0.0, route=TransferRoute("tcp")),
        BlocksSent(epoch, (2, 3), 2 * BIG, at=0.0, route=TransferRoute("tcp")),
    ]


def test_window_bounds_the_frames_without_acknowledgement(tcp_engine, receiver, write, epoch):
    prefill = tcp_engine("prefill", bandwidth=1 << 30, block_bytes=64, num_blocks=4000)
    write(prefill, epoch, receiver, [(i, i) for i in range(2560)])
    sock = receiver.accept()
    for _ in range(8):
        take_frame(sock)
    sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    acknowledge(sock, epoch)
    sock.settimeout(20)
    assert take_frame(sock)[0].block_ids[0] == 8 * 256


def test_a_port_without_a_listener_ends_the_epoch_with_the_reason(
    tcp_engine, receiver, write, epoch
):
    prefill = tcp_engine("prefill")
    receiver.listener.close()
    write(prefill, epoch, receiver, [(0, 1)])
    assert prefill.wait_for(SendEnded) == [
        SendEnded(epoch, f"cannot connect to {receiver.address}: connection refused")
    ]


def test_address_that_cannot_be_split_ends_the_epoch_with_the_reason(tcp_engine, epoch):
    prefill = tcp_engine("prefill")
    prefill.transport.write(epoch, "decode", ["nowhere"], [(0, 1)])
    (ended,) = prefill.wait_for(SendEnded)
    assert ended.reason == "address 'nowhere' is not host:port (an IPv6 host goes in brackets)"


def test_peer_that_never_answers_hello_is_given_up(tcp_engine, receiver, write, epoch):
    prefill = tcp_engine("prefill", connect_seconds=0.1)
    write(prefill, epoch, receiver, [(0, 1)])
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "no answer in 0.1 s")]


def test_refused_hello_ends_every_queued_epoch_with_the_reason(tcp_engine, receiver, write):
    prefill, epochs = tcp_engine("prefill"), [os.urandom(16), os.urandom(16)]
    for epoch in epochs:
        write(prefill, epoch, receiver, [(0, 1)])
    receiver.accept(refusal="this is engine other")
    assert prefill.wait_for(SendEnded, 2) == [
        SendEnded(epoch, "refused: this is engine other") for epoch in epochs
    ]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 64])
def test_peer_that_is_no_kv_port_ends_the_epoch(tcp_engine, receiver, write, epoch, answer):
    prefill = tcp_engine("prefill")
    write(prefill, epoch, receiver, [(0, 1)])
    sock, _ = receiver.listener.accept()
    receiver.socks.append(sock)
    sock.sendall(answer)
    (ended,) = prefill.wait_for(SendEnded)
    assert ended.reason.startswith("not a KV port")


@pytest.mark.parametrize("named", [bytes(16), None])
def test_acknowledgement_of_what_was_not_sent_ends_the_connection(
    tcp_engine, receiver, write, epoch, named
):
    prefill = tcp_engine("prefill")
    write(prefill, epoch, receiver, [(0, 1)])
    sock = receiver.accept()
    take_frame(sock)
    if named is None:
        acknowledge(sock, epoch)
        acknowledge(sock, epoch)
        prefill.wait_sent(1)
        assert sock.recv(1) == b""
    else:
        acknowledge(sock, named)
        assert prefill.wait_for(SendEnded) == [
            SendEnded(epoch, "the peer acknowledged a frame that was not sent")
        ]


def test_peer_killed_in_mid_transfer_ends_its_epochs_and_no_other_peers(
    tcp_engine, receiver, write, epoch
):
    prefill, decode = (
        tcp_engine("prefill", block_bytes=BIG, num_blocks=MANY),
        tcp_engine("decode-2", block_bytes=BIG),
    )
    other, idle = os.urandom(16), os.urandom(16)
    decode.transport.open(other, [0, 1])
    write(prefill, idle, receiver, [(0, 0)])
    sock = serve_one(receiver, prefill)
    write(prefill, epoch, receiver, [(i, i) for i in range(MANY)])
    prefill.write(other, decode, [(0, 0)])
    read(sock, wire.decode_request)
    sock.close()
    (ended,) = prefill.wait_for(SendEnded)
    assert ended.epoch == epoch  # not the one that is fully acknowledged
    assert ended.reason in ("connection reset by peer", "connection closed by peer", "broken pipe")
    prefill.write(other, decode, [(1, 1)])
    prefill.wait_sent(3)


def test_write_after_a_failure_connects_again(tcp_engine, receiver, write, epoch):
    prefill = tcp_engine("prefill")
    write(prefill, os.urandom(16), receiver, [(0, 1)])
    receiver.accept().close()
    prefill.wait_for(SendEnded)
    write(prefill, epoch, receiver, [(2, 1)])
    serve_one(receiver, prefill)


def test_connection_that_the_peer_closed_while_idle_is_made_again_unnoticed(
    tcp_engine, receiver, write, epoch
):
    prefill = tcp_engine("prefill")
    for _ in range(3):
        write(prefill, epoch, receiver, [(0, 1)])
        sock = serve_one(receiver, prefill, len(receiver.socks) + 1)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""  # the sender has seen it and closed too
    assert not any(isinstance(event, SendEnded) for event in prefill.events)


def test_restarted_engine_at_the_same_address_refuses_writes_for_the_old_one(tcp_engine, epoch):
    prefill, decode = tcp_engine("prefill"), tcp_engine("decode")
    decode.transport.open(epoch, [1, 2])
    prefill.write(epoch, decode, [(0, 1)])
    prefill.wait_sent(1)
    decode.transport.close()
    restarted = tcp_engine("decode-restarted", port=decode.transport.ports[0])
    before = bytes(restarted.memory.block(2))
    prefill.write(epoch, decode, [(1, 2)])
    (ended,) = prefill.wait_for(SendEnded)
    assert ended.reason.startswith(("refused: another engine listens here", "connection"))
    assert restarted.memory.block(2) == before
    new_epoch = os.urandom(16)
    restarted.transport.open(new_epoch, [2])
    prefill.write(new_epoch, restarted, [(1, 2)])
    prefill.wait(
        lambda events: (
            events[-1] == BlocksSent(new_epoch, (1,), 4096, at=0.0, route=TransferRoute("tcp"))
        )
    )


def test_cancel_waits_for_the_frame_in_hand_and_sends_no_other(tcp_engine, receiver, write, epoch):
    prefill = tcp_engine("prefill", block_bytes=16 * BIG, num_blocks=3)
    write(prefill, epoch, receiver, [(0, 0), (1, 1), (2, 2)])
    sock = receiver.accept()
    # the first frame is on its way and cannot end: its payload is not read
    header = read(sock, wire.decode_request)
    prefill.transport.cancel(epoch)
    assert prefill.transport.poll() == []
    got = 0
    while got < header.payload_bytes:
        got += len(sock.recv(header.payload_bytes - got))
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "cancelled")]
    acknowledge(sock, epoch)
    other = os.urandom(16)
    write(prefill, other, receiver, [(2, 0)])
    assert read(sock, wire.decode_request).epoch == other
    assert prefill.transport.poll() == []


@pytest.mark.parametrize(
    ("block_bytes", "is_cancelled"), [(64, False), (32 * BIG, False), (32 * BIG, True)]
)
def test_peer_that_stops_reading_or_acknowledging_is_given_up(
    tcp_engine, receiver, write, epoch, block_bytes, is_cancelled
):
    prefill = tcp_engine("prefill", block_bytes=block_bytes, num_blocks=1, stall_seconds=0.2)
    write(prefill, epoch, receiver, [(0, 0)])
    receiver.accept()
    if is_cancelled:
        prefill.transport.cancel(epoch)
    reason = "cancelled" if is_cancelled else "stalled: no progress for 0.2 s"
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, reason)]


def test_cancel_while_the_bandwidth_cap_holds_frames_back_is_immediate(tcp_engine, epoch):
    prefill, decode = tcp_engine("prefill", bandwidth=1), tcp_engine("decode")
    decode.transport.open(epoch, [1, 2])
    prefill.write(epoch, decode, [(0, 1), (1, 2)])
    prefill.wait_sent(1)  # the next would follow after 4096 s
    prefill.transport.cancel(epoch)
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "cancelled")]
    decode.transport.fence(epoch)
    assert decode.wait_for(Fenced)[0].received == {1}


def test_cancel_and_fence_in_mid_transfer_leave_a_prefix_that_is_whole(tcp_engine, epoch):
    prefill, decode = (
        tcp_engine(name, block_bytes=BIG, num_blocks=MANY, bandwidth=BIG * 20)
        for name in ("prefill", "decode")
    )
    decode.transport.open(epoch, range(MANY))
    prefill.write(epoch, decode, [(i, i) for i in range(MANY)])
    prefill.wait_sent(3)
    prefill.transport.cancel(epoch)
    decode.transport.fence(epoch)
    prefill.wait_for(SendEnded)
    (fenced,) = decode.wait_for(Fenced)
    assert fenced.received == set(range(len(fenced.received)))
    assert 3 <= len(fenced.received) < MANY
    assert all(
        decode.memory.block(block) == prefill.memory.block(block) for block in fenced.received
    )


def test_transfer_of_many_blocks_and_epochs_is_exact(tcp_engine):
    prefill, decode = (
        tcp_engine(name, block_bytes=BIG // 4, num_blocks=40, verify=True)
        for name in ("prefill", "decode")
    )
    epochs = [os.urandom(16) for _ in range(4)]
    targets = {
        epoch: [(7 * i + 10 * n) % 10 + 10 * n for i in range(10)] for n, epoch in enumerate(epochs)
    }
    for epoch in epochs:
        decode.transport.open(epoch, targets[epoch])
    for half in (slice(0, 5), slice(5, 10)):
        for epoch in epochs:
            prefill.write(epoch, decode, [(39 - block, block) for block in targets[epoch][half]])
    prefill.wait_sent(40)
    for epoch in epochs:
        decode.transport.fence(epoch)
    checksums = {event.epoch: event.checksum for event in decode.wait_for(Fenced, 4)}
    assert checksums == {epoch: prefill.transport.checksum(epoch) for epoch in epochs}
    assert all(
        decode.memory.block(block) == prefill.memory.block(39 - block) for block in range(40)
    )


class UnsummedMemory(ByteMemory):
    """Gives a block to be sent, and fails when it is read again for its checksum."""

    num_reads = 0

    def block(self, block_id, heads=None):
        self.num_reads += 1
        if self.num_reads > 1:
            raise RuntimeError("no memory for a copy")
        return super().block(block_id, heads)


def test_epoch_ends_where_the_checksum_of_a_sent_frame_cannot_be_made(
    tcp_engine, receiver, write, epoch
):
    prefill = tcp_engine("prefill", memory=UnsummedMemory(), verify=True)
    write(prefill, epoch, receiver, [(0, 0)])
    receiver.accept()
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "no memory for a copy")]


def test_close_with_transfers_under_way_ends_all_threads(tcp_engine, receiver, write, epoch):
    prefill = tcp_engine("prefill", block_bytes=32 * BIG, num_blocks=1)
    write(prefill, epoch, receiver, [(0, 0)])
    receiver.accept()
    prefill.transport.close()
    assert not [thread.name for thread in threading.enumerate() if receiver.address in thread.name]


def test_ipv6_peers_reach_each_other(tcp_engine, epoch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    prefill, decode = tcp_engine("prefill"), tcp_engine("decode", host="::1")
    decode.transport.open(epoch, [1])
    prefill.transport.write(epoch, "decode", [f"[::1]:{decode.transport.ports[0]}"], [(0, 1)])
    prefill.wait_sent(1)


class Clock:
    """Monotonic seconds that the test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("closes_first", [False, True])
def test_nothing_is_written_on_a_connection_that_was_idle_too_long(
    tcp_engine, receiver, write, closes_first
):
    """As after a time in which the sender's process was stopped: no timer has run, the peer may
    have closed.
    """
    clock = Clock()
    prefill = tcp_engine("prefill", clock=clock)
    for turn in range(1, 4):
        write(prefill, os.urandom(16), receiver, [(0, 1)])
        sock = serve_one(receiver, prefill, turn)
        clock.now += LinkSettings.__dataclass_fields__["idle_seconds"].default + 1
        if closes_first:
            sock.shutdown(socket.SHUT_WR)
    write(prefill, os.urandom(16), receiver, [(0, 1)])

    assert sock.recv(1) == b""
    assert take_frame(receiver.accept())
    assert not any(isinstance(event, SendEnded) for event in prefill.events)


def test_link_that_has_nothing_to_write_leaves_by_itself(
    tcp_engine, receiver, write, epoch, monkeypatch
):
    monkeypatch.setattr(tcp, "LinkSettings", partial(LinkSettings, idle_seconds=0.05))
    prefill = tcp_engine("prefill")
    write(prefill, epoch, receiver, [(0, 1)])

    assert serve_one(receiver, prefill).recv(1) == b""


def test_link_whose_work_was_cancelled_before_it_was_sent_survives_the_end_of_its_idle_connection(
    tcp_engine, receiver, write, epoch
):
    clock = Clock()
    prefill = tcp_engine("prefill", clock=clock)
    write(prefill, os.urandom(16), receiver, [(0, 1)])
    prefill.transport.cancel(next(iter(prefill.transport._sendings)))
    sock = receiver.accept()
    clock.now += 31
    sock.shutdown(socket.SHUT_WR)
    write(prefill, epoch, receiver, [(0, 1)])

    assert take_frame(receiver.accept())[0].epoch == epoch
