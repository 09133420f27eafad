"""Threads that copy blocks: each copy is answered once, whatever becomes of it."""

import threading

import pytest

from pdcluster_worker.config.engine import KvTierConfig
from pdcluster_worker.engine.tier_ports import POOL, BlockCopy, BlockPlace, TierFacts
from pdcluster_worker.errors import ModelError
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

    def run(self, *copies, cancel=()):
        """Answers of these (source, target), by their order."""
        jobs = [
            BlockCopy(number, b"key", BlockPlace(*source), BlockPlace(*target))
            for number, (source, target) in enumerate(copies)
        ]
        self.copier.cancel(cancel)
        self.copier.start(jobs)
        answers = {}
        while len(answers) < len(copies):
            assert self.awake.wait(LIMIT_SECONDS), "a copy has no answer"
            self.awake.clear()
            for answer in self.copier.poll():
                assert answer.copy_id not in answers, "a copy is answered twice"
                answers[answer.copy_id] = answer
        return [answers[number] for number in range(len(copies))]


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


def test_a_copy_that_is_cancelled_is_answered_and_writes_nothing(copies):
    rig = copies(host())
    rig.fill(2, 9)
    assert rig.run(((0, 0), (POOL, 2)), cancel=[0])[0].outcome == "cancelled"
    assert bytes(rig.memory.block(2)) == b"\t" * 32


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
            open_tiers([config], memory, BlockFacts("w", GEOMETRY, "cpu"), bytearray, lambda: None)
