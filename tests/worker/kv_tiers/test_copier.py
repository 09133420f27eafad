"""Threads that copy blocks: each copy is answered once, whatever becomes of it."""

import threading

import pytest

from pdcluster_worker.config.engine import KvTierConfig
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopy,
    BlockLookup,
    BlockPlace,
    TierFacts,
)
from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers import copier
from pdcluster_worker.kv_tiers.copier import TierCopier
from pdcluster_worker.kv_tiers.host import HostTier
from pdcluster_worker.kv_tiers.open import BlockFacts, open_tiers
from pdcluster_worker.messages.facts import KVGeometry
from tests.worker.fake_runner import FakeRunner

LIMIT_SECONDS = 20.0


class FullTier:
    """A tier whose writes fail and whose reads raise."""

    facts = TierFacts("full", 4)

    def write(self, slot, key, block):
        raise OSError(28, "No space left on device")

    def read(self, slot, key, target):
        raise RuntimeError("broken")

    def close(self):
        pass


class Copies:
    """A copier over a FakeRunner of 8 blocks, and its answers."""

    def __init__(self, tiers):
        self.memory = FakeRunner(8, 4)
        self.awake = threading.Event()
        self.copier = TierCopier(self.memory, self.memory.heads, tiers, self.awake.set)

    def fill(self, block_id, value):
        self.memory.block(block_id)[:] = bytes([value]) * self.memory.block_bytes

    def run(self, *copies):
        """Answers of these (source, target), by their order."""
        jobs = [
            BlockCopy(number, b"key", BlockPlace(*source), BlockPlace(*target))
            for number, (source, target) in enumerate(copies)
        ]
        self.copier.start(jobs)
        return self.wait(len(copies))

    def wait(self, count):
        answers = {}
        while len(answers) < count:
            assert self.awake.wait(LIMIT_SECONDS), "a copy has no answer"
            self.awake.clear()
            for answer in self.copier.poll():
                assert answer.copy_id not in answers, "a copy is answered twice"
                answers[answer.copy_id] = answer
        return [answers[number] for number in range(count)]


@pytest.fixture
def copies():
    made = []

    def build(*tiers):
        made.append(Copies(tiers))
        return made[-1]

    yield build
    for each in made:
        each.copier.close()


def host(num_slots=4):
    return HostTier("host", bytearray(num_slots * 32), num_slots, 32)


def test_a_block_comes_back_from_a_tier_and_from_the_next(copies):
    rig = copies(host(), host())
    rig.fill(1, 7)
    assert rig.run(((POOL, 1), (0, 2)))[0].outcome == "copied"
    rig.fill(1, 0)
    assert rig.run(((0, 2), (1, 3)))[0].outcome == "copied"
    answers = rig.run(((0, 2), (POOL, 5)), ((1, 3), (POOL, 6)))
    assert [answer.outcome for answer in answers] == ["copied", "copied"]
    assert bytes(rig.memory.block(5)) == bytes(rig.memory.block(6)) == b"\7" * 32
    assert all(answer.seconds >= 0.0 for answer in answers)


def test_many_copies_are_all_answered(copies):
    rig = copies(host())
    answers = rig.run(*(((POOL, number % 8), (0, number % 4)) for number in range(200)))
    assert {answer.outcome for answer in answers} == {"copied"}


class HungTier:
    """A tier that answers reads and writes once it is let go."""

    def __init__(self, name="hung", store=""):
        self.facts = TierFacts(name, 4, store=store)
        self.begun, self.go = threading.Event(), threading.Event()
        self.closed = False

    def write(self, slot, key, block):
        self.read(slot, key, block)

    def read(self, slot, key, target):
        self.begun.set()
        assert self.go.wait(LIMIT_SECONDS)
        return True

    has = read

    def close(self):
        self.closed = True


def test_a_read_that_is_cancelled_is_answered_at_once_and_writes_nothing(copies):
    hung = HungTier()
    rig = copies(hung)
    rig.fill(2, 9)
    rig.copier.start(
        [BlockCopy(n, b"key", BlockPlace(0, n), BlockPlace(POOL, 2)) for n in range(2)]
    )
    assert hung.begun.wait(LIMIT_SECONDS)
    rig.copier.cancel([0, 1])  # the first has begun, the second has not
    answers = rig.copier.poll()
    assert sorted(answers) == [(0, "cancelled", 0.0, ""), (1, "cancelled", 0.0, "")]
    hung.go.set()
    rig.copier.close()
    assert rig.copier.poll() == []
    assert bytes(rig.memory.block(2)) == b"\t" * 32


def test_a_tier_that_hangs_holds_up_no_other(copies):
    hung = HungTier()
    rig = copies(hung, host())
    rig.copier.start([BlockCopy(9, b"key", BlockPlace(POOL, 1), BlockPlace(0, 0))])
    assert hung.begun.wait(LIMIT_SECONDS)
    answers = rig.run(((POOL, 1), (1, 2)), ((1, 2), (POOL, 3)))
    assert [answer.outcome for answer in answers] == ["copied", "copied"]
    hung.go.set()


def test_a_hung_tier_does_not_keep_a_worker_from_ending(copies, monkeypatch):
    monkeypatch.setattr(copier, "CLOSE_SECONDS", 0.1)
    hung, healthy = HungTier(), HungTier("healthy")
    rig = copies(hung, healthy)
    rig.copier.start([BlockCopy(0, b"key", BlockPlace(0, 0), BlockPlace(POOL, 2))])
    assert hung.begun.wait(LIMIT_SECONDS)
    rig.copier.close()
    assert (hung.closed, healthy.closed) == (False, True)
    hung.go.set()


class Missing(HungTier):
    def read(self, slot, key, target):
        raise KeyError(key)

    def has(self, keys):
        if keys[0] == b"error":
            raise OSError(111, "Connection refused")
        return len(keys) - 1


def test_lookups_are_answered_and_a_block_that_others_deleted_is_absent(copies):
    rig = copies(Missing("shared", "s"))
    assert rig.run(((0, 0), (POOL, 1)))[0].outcome == "absent"
    found = {}
    for number, keys in enumerate(([b"a", b"b"], [b"error"])):
        rig.copier.look_up(BlockLookup(number, 0, keys))
    while len(found) < 2:
        assert rig.awake.wait(LIMIT_SECONDS)
        rig.awake.clear()
        found |= {answer.lookup_id: answer for answer in rig.copier.poll()}
    assert (found[0].num_found, found[0].reason) == (1, "")
    assert (found[1].num_found, found[1].reason) == (0, "Connection refused")


def test_a_full_tier_and_an_unexpected_error_are_answers(copies):
    rig = copies(FullTier())
    full, broken = rig.run(((POOL, 0), (0, 0)), ((0, 0), (POOL, 1)))
    assert (full.outcome, full.reason) == ("failed", "No space left on device")
    assert (broken.outcome, broken.reason) == ("failed", "RuntimeError: broken")
    assert rig.run(((POOL, 0), (0, 1)))[0].outcome == "failed"


GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


def test_a_tier_of_less_than_two_blocks_is_refused(tmp_path):
    memory = FakeRunner(8, 4)
    for config in (
        KvTierConfig(type="host", size=63),
        KvTierConfig(type="disk", size=4096, path=str(tmp_path)),
    ):
        with pytest.raises(ModelError, match=rf"{config.type}: size .* holds no two KV blocks of"):
            open_tiers(
                [config], memory, BlockFacts("w", GEOMETRY, "cpu", False), bytearray, lambda: None
            )
