"""The moment that sockets cannot stage: a fence while bytes are being copied into a block."""

import pytest

from pdcluster_worker.engine.ports import Fenced
from pdcluster_worker.kv_transfer.inbox import Inbox
from tests.worker.kv_transfer.conftest import ByteMemory

HEADS = range(1)


@pytest.fixture
def events():
    return []


@pytest.fixture
def inbox(events):
    return Inbox(ByteMemory(8, 4), verify=True, emit=events.append)


def test_fence_during_a_copy_comes_when_the_copy_leaves_and_once(inbox, events, epoch):
    inbox.open(epoch, [1, 2])
    receiving = inbox.claim(epoch, HEADS, [1])
    assert inbox.enter(receiving)
    inbox.fence(epoch)
    inbox.fence(epoch)
    assert events == []
    assert inbox.claim(epoch, HEADS, [2]) == "dead epoch"
    with pytest.raises(ValueError, match="fence it first"):
        inbox.open(bytes(16), [1])
    inbox.leave(receiving)
    assert events == [Fenced(epoch, frozenset(), 0)]
    assert not inbox.enter(receiving)


def test_block_that_is_copied_but_not_completed_before_the_fence_is_missing(inbox, events, epoch):
    inbox.open(epoch, [1, 2])
    receiving = inbox.claim(epoch, HEADS, [1, 2])
    assert inbox.complete(receiving, 1, lambda: None)
    inbox.fence(epoch)
    assert not inbox.complete(receiving, 2, lambda: None)
    assert events == [Fenced(epoch, frozenset({1}), 8)]


def test_whole_block_lands_before_the_fence_and_never_after(inbox, epoch):
    """A cache on a device is written then; a fenced block may have another owner."""
    inbox.open(epoch, [1, 2])
    receiving = inbox.claim(epoch, HEADS, [1, 2])
    landed = []
    inbox.complete(receiving, 1, lambda: landed.append("arrived"))
    inbox.fence(epoch)
    inbox.complete(receiving, 2, lambda: landed.append("too late"))
    assert landed == ["arrived"]


def test_fence_during_a_landing_comes_when_it_is_over(inbox, events, epoch):
    inbox.open(epoch, [1])
    receiving = inbox.claim(epoch, HEADS, [1])
    seen = []

    def write_block():
        inbox.fence(epoch)
        seen.extend(events)

    assert not inbox.complete(receiving, 1, write_block)
    assert seen == []
    assert events == [Fenced(epoch, frozenset(), 0)]


def test_blocks_may_be_opened_again_after_the_fence(inbox, events, epoch):
    inbox.open(epoch, [1])
    inbox.fence(epoch)
    inbox.open(bytes(16), [1])
    assert inbox.claim(epoch, HEADS, [1]) == "dead epoch"
