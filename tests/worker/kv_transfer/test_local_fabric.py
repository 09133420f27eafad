"""Deferred delivery: bytes that arrive late or never, as tests of the engine need them."""

import os

import pytest

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded, TransferRoute
from pdcluster_worker.testing.local_transport import LocalFabric, LocalTransport


class Memory:
    heads = range(1)
    head_bytes = 8
    num_blocks = 4

    def __init__(self):
        self._data = bytearray(os.urandom(32))

    def block(self, block_id, heads=None):
        return memoryview(self._data)[block_id * 8 : block_id * 8 + 8]

    def staging(self, block_id, heads=None):
        return self.block(block_id)

    def write_block(self, block_id, staging, heads=None): ...


@pytest.fixture
def fabric():
    return LocalFabric(deferred=True)


@pytest.fixture
def memories():
    return Memory(), Memory()


@pytest.fixture
def transports(fabric, memories):
    return tuple(
        LocalTransport(fabric, [memory], name) for name, memory in zip("pd", memories, strict=True)
    )


def test_deferred_write_arrives_with_its_delivery_and_as_it_was_written(
    fabric, memories, transports, epoch
):
    written = bytes(memories[0].block(0))
    transports[1].open(epoch, [1, 2])
    transports[0].write(epoch, "d", [""], [(0, 1), (0, 2)])
    memories[0].block(0)[:] = bytes(8)
    assert transports[0].poll() == []
    assert fabric.num_pending == 2
    assert fabric.deliver_next()
    assert transports[0].poll() == [BlocksSent(epoch, (0,), 8, at=0.0, route=TransferRoute("tcp"))]
    assert memories[1].block(1) == written
    assert fabric.deliver_next()
    assert not fabric.deliver_next()


def test_delivery_after_cancel_and_fence_writes_nothing(fabric, memories, transports, epoch):
    before = bytes(memories[1].block(1))
    transports[1].open(epoch, [1])
    transports[0].write(epoch, "d", [""], [(0, 1)])
    transports[0].cancel(epoch)
    transports[1].fence(epoch)
    assert transports[0].poll() == [SendEnded(epoch, "cancelled")]
    assert transports[1].poll() == [Fenced(epoch, frozenset(), 0)]
    fabric.deliver_next()
    assert memories[1].block(1) == before
    assert transports[0].poll() == []


def test_delivery_between_cancel_and_fence_counts_as_received(fabric, transports, epoch):
    transports[1].open(epoch, [1])
    transports[0].write(epoch, "d", [""], [(0, 1)])
    transports[0].cancel(epoch)
    fabric.deliver_next()
    transports[1].fence(epoch)
    assert transports[1].poll() == [Fenced(epoch, frozenset({1}), 8)]


def test_dropped_delivery_ends_the_epoch_and_what_follows_is_refused(
    fabric, memories, transports, epoch
):
    before = bytes(memories[1].block(2))
    transports[1].open(epoch, [1, 2])
    transports[0].write(epoch, "d", [""], [(0, 1), (1, 2)])
    assert fabric.drop_next()
    fabric.deliver_next()
    assert transports[0].poll() == [SendEnded(epoch, "connection reset by peer")]
    assert memories[1].block(2) == before
    assert not fabric.drop_next()


def test_delivery_to_an_engine_that_is_gone_is_refused(fabric, transports, epoch):
    transports[1].open(epoch, [1])
    transports[0].write(epoch, "d", [""], [(0, 1)])
    transports[1].close()
    fabric.deliver_next()
    assert transports[0].poll() == [SendEnded(epoch, "refused: no engine d")]


def test_checksum_is_none_without_verification(fabric, transports, epoch):
    transports[1].open(epoch, [1])
    transports[0].write(epoch, "d", [""], [(0, 1)])
    fabric.deliver_next()
    assert transports[0].checksum(epoch) is None
    transports[1].fence(epoch)
    assert transports[1].poll()[0].checksum is None


def test_forget_of_an_unfinished_epoch_is_an_error(transports, epoch):
    transports[1].open(epoch, [1])
    transports[0].write(epoch, "d", [""], [(0, 1)])
    with pytest.raises(ValueError, match="cancel it"):
        transports[0].forget(epoch)


def test_attach_refuses_an_engine_id_that_is_taken(fabric, memories, transports):
    with pytest.raises(ValueError, match="attached already"):
        LocalTransport(fabric, [memories[0]], "p")
