"""Behaviour of every transport; each test runs over each that is there."""

import os

import pytest

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded, TransferRoute
from pdcluster_worker.kv_transfer.carrier import HostSlots
from tests.worker.kv_transfer.conftest import MakePair


def test_write_moves_blocks_and_both_checksums_agree(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [3, 1, 7])
    prefill.write(epoch, decode, [(0, 3), (5, 1)])
    prefill.write(epoch, decode, [(2, 7)])
    prefill.wait_sent(3)
    sent = [block for event in prefill.events for block in event.block_ids]
    assert sent == [0, 5, 2]
    assert sum(event.num_bytes for event in prefill.events) == 3 * prefill.memory.block_bytes
    decode.transport.fence(epoch)
    (fenced,) = decode.wait_for(Fenced)
    assert fenced.received == {3, 1, 7}
    assert fenced.num_bytes == 3 * decode.memory.block_bytes
    assert fenced.checksum is not None
    assert fenced.checksum == prefill.transport.checksum(epoch)
    assert all(
        decode.memory.block(t) == prefill.memory.block(s) for s, t in [(0, 3), (5, 1), (2, 7)]
    )


def test_blocks_go_by_the_transport_that_both_have(pair, epoch, transport):
    prefill, decode = pair
    decode.transport.open(epoch, [3, 1])
    prefill.write(epoch, decode, [(0, 3), (5, 1)])
    prefill.wait_sent(2)
    assert {event.route for event in prefill.events} == {TransferRoute(transport)}


@pytest.mark.parametrize("way", ["nixl", "ucx"])
def test_a_block_that_a_carrier_damages_is_not_what_the_writer_summed_up(pair, epoch, monkeypatch):
    """Damage on tcp: tests/system/test_verification, by a relay between two workers."""

    load = HostSlots.load

    def damaged(self, start, block_id, heads):
        load(self, start, block_id, heads)
        self.array[start] ^= 1

    monkeypatch.setattr(HostSlots, "load", damaged)
    prefill, decode = pair
    decode.transport.open(epoch, [3])
    prefill.write(epoch, decode, [(0, 3)])
    prefill.wait_sent(1)
    decode.transport.fence(epoch)
    (fenced,) = decode.wait_for(Fenced)
    assert fenced.received == {3}
    assert fenced.checksum != prefill.transport.checksum(epoch)


def test_fence_of_a_partial_transfer_names_what_arrived_and_has_no_checksum(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [3, 1])
    prefill.write(epoch, decode, [(0, 3)])
    prefill.wait_sent(1)
    decode.transport.fence(epoch)
    assert decode.wait_for(Fenced) == [
        Fenced(epoch, frozenset({3}), decode.memory.block_bytes, None)
    ]


def test_fence_of_an_unknown_or_fenced_epoch_is_answered_empty(pair, epoch):
    _, decode = pair
    decode.transport.fence(epoch)
    decode.transport.open(epoch, [1])
    decode.transport.fence(epoch)
    decode.transport.fence(epoch)
    assert decode.wait_for(Fenced, 3) == [Fenced(epoch, frozenset(), 0)] * 3


def test_write_after_the_fence_is_refused_and_the_block_is_unchanged(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [1])
    decode.transport.fence(epoch)
    before = bytes(decode.memory.block(1))
    prefill.write(epoch, decode, [(0, 1)])
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "refused: dead epoch")]
    assert decode.memory.block(1) == before


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([(0, 9)], "refused: block 9 is not open under this epoch"),
        ([(0, 999)], "refused: block 999 is not open under this epoch"),
        ([(0, 2)], "refused: block 2 is out of order"),
        ([(0, 1), (1, 1)], "refused: block 1 was already written"),
    ],
)
def test_write_outside_of_the_opened_order_is_refused(pair, epoch, pairs, reason):
    prefill, decode = pair
    decode.transport.open(epoch, [1, 2])
    before = [bytes(decode.memory.block(block)) for block in (2, 9)]
    prefill.write(epoch, decode, pairs)
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, reason)]
    assert [decode.memory.block(block) for block in (2, 9)] == before


def test_write_after_its_epoch_ended_adds_no_event(pair, epoch):
    prefill, decode = pair
    prefill.write(epoch, decode, [(0, 1)])
    prefill.wait_for(SendEnded)
    prefill.write(epoch, decode, [(1, 2)])
    prefill.transport.cancel(epoch)
    other = os.urandom(16)
    decode.transport.open(other, [4])
    prefill.write(other, decode, [(3, 4)])
    prefill.wait_sent(1)
    assert prefill.events == [
        SendEnded(epoch, "refused: dead epoch"),
        BlocksSent(other, (3,), prefill.memory.block_bytes, at=0.0, route=TransferRoute("tcp")),
    ]


def test_write_to_another_engine_id_is_refused(pair, epoch):
    prefill, decode = pair
    prefill.transport.write(epoch, "decode-before-restart", [decode.address], [(0, 1)])
    (ended,) = prefill.wait_for(SendEnded)
    assert ended.reason.startswith("refused: ")


def test_write_of_one_epoch_to_two_peers_is_an_error(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [1, 2])
    prefill.write(epoch, decode, [(0, 1)])
    with pytest.raises(ValueError, match="one peer"):
        prefill.transport.write(epoch, "third", [decode.address], [(0, 2)])


def test_cancel_of_an_idle_epoch_ends_it_once(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [1, 2])
    prefill.write(epoch, decode, [(0, 1)])
    prefill.wait_sent(1)
    prefill.transport.cancel(epoch)
    prefill.transport.cancel(epoch)
    prefill.write(epoch, decode, [(0, 2)])
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "cancelled")]
    assert prefill.transport.poll() == []


def test_cancel_of_an_unknown_epoch_is_answered(pair, epoch):
    prefill, _ = pair
    prefill.transport.cancel(epoch)
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "cancelled")]


def test_forget_drops_the_record_of_a_finished_epoch(pair, epoch):
    prefill, decode = pair
    decode.transport.open(epoch, [1])
    prefill.write(epoch, decode, [(0, 1)])
    prefill.wait_sent(1)
    assert prefill.transport.checksum(epoch) is not None
    prefill.transport.forget(epoch)
    prefill.transport.forget(epoch)
    assert prefill.transport.checksum(epoch) is None


@pytest.mark.parametrize(
    ("name", "block_ids", "reason"),
    [
        (b"short", [1], "epoch has 5 bytes"),
        (bytes(16), [16], "distinct and in 0..15"),
        (bytes(16), [-1], "distinct and in 0..15"),
        (bytes(16), [2, 2], "distinct and in 0..15"),
    ],
)
def test_open_refuses_what_cannot_be_received(pair, name, block_ids, reason):
    _, decode = pair
    with pytest.raises(ValueError, match=reason):
        decode.transport.open(name, block_ids)


def test_open_refuses_a_block_or_an_epoch_that_is_open_already(pair, epoch):
    _, decode = pair
    decode.transport.open(epoch, [1])
    with pytest.raises(ValueError, match="open already"):
        decode.transport.open(epoch, [2])
    with pytest.raises(ValueError, match="fence it first"):
        decode.transport.open(os.urandom(16), [1])
    decode.transport.fence(epoch)
    decode.transport.open(os.urandom(16), [1])


def test_transports_send_both_ways_at_once(pair):
    epochs = [os.urandom(16), os.urandom(16)]
    for engine, peer, epoch in (*[(pair[0], pair[1], epochs[0])], *[(pair[1], pair[0], epochs[1])]):
        peer.transport.open(epoch, [8, 9])
        engine.write(epoch, peer, [(0, 8), (1, 9)])
    for engine, peer in (pair, pair[::-1]):
        engine.wait_sent(2)
        assert peer.memory.block(8) == engine.memory.block(0)


VERIFIED, OTHER = bytes(16), bytes([1]) * 16


def test_verified_epoch_has_a_checksum_and_others_have_none(make_pair: MakePair) -> None:
    """With engine.verifyTransfers off."""
    prefill, decode = make_pair(verify=False)
    for epoch, target, verify in ((VERIFIED, 3, True), (OTHER, 4, False)):
        decode.transport.open(epoch, [target], verify=verify)
        to = decode.engine_id, [decode.address] if decode.transport.ports[0] else [""]
        prefill.transport.write(epoch, *to, [(0, target)], verify=verify)
    prefill.wait_sent(2)
    sent = prefill.transport.checksum(VERIFIED)
    for epoch in (VERIFIED, OTHER):
        decode.transport.fence(epoch)
    fenced = {event.epoch: event for event in decode.wait_for(Fenced, 2)}

    assert sent is not None
    assert fenced[VERIFIED].checksum == sent
    assert (prefill.transport.checksum(OTHER), fenced[OTHER].checksum) == (None, None)
