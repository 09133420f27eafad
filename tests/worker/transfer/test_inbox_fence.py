"""The moment that sockets cannot stage: a fence while bytes are being copied into a block."""

import pytest

from pdcluster_worker.engine.ports import Fenced
from pdcluster_worker.transfer.inbox import Inbox


class Memory:
    block_bytes = 8
    num_blocks = 4

    def block(self, block_id):
        return memoryview(bytearray(8))


@pytest.fixture
def events():
    return []


@pytest.fixture
def inbox(events):
    return Inbox(Memory(), verify=True, emit=events.append)


def test_fence_during_a_copy_comes_when_the_copy_leaves_and_once(inbox, events, epoch):
    inbox.open(epoch, [1, 2])
    receiving = inbox.claim(epoch, [1])
    assert inbox.enter(receiving)
    inbox.fence(epoch)
    inbox.fence(epoch)
    assert events == []
    assert inbox.claim(epoch, [2]) == "dead epoch"
    with pytest.raises(ValueError, match="fence it first"):
        inbox.open(bytes(16), [1])
    inbox.leave(receiving)
    assert events == [Fenced(epoch, frozenset(), 0)]
    assert not inbox.enter(receiving)


def test_block_that_is_copied_but_not_completed_before_the_fence_is_missing(inbox, events, epoch):
    inbox.open(epoch, [1, 2])
    receiving = inbox.claim(epoch, [1, 2])
    assert inbox.complete(receiving, 1)
    inbox.fence(epoch)
    assert not inbox.complete(receiving, 2)
    assert events == [Fenced(epoch, frozenset({1}), 8)]


def test_blocks_may_be_opened_again_after_the_fence(inbox, events, epoch):
    inbox.open(epoch, [1])
    inbox.fence(epoch)
    inbox.open(bytes(16), [1])
    assert inbox.claim(epoch, [1]) == "dead epoch"
