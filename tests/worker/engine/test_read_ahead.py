"""Prefixes read from tiers below the pool: ownership, order, the choice to read, statistics."""

import pytest

from pdcluster_worker.engine.kv_tiers import HELD_SHARE
from pdcluster_worker.engine.tier import STUCK_SECONDS
from pdcluster_worker.engine.tier_slots import TierSlots
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.requests import TransferTarget
from tests.worker.engine.conftest import make_spec
from tests.worker.engine.tiered import LONG, MORE, OTHER, ask, check_answer, finish, hashes


@pytest.fixture
def tiered(engine):
    """Builds a rig with tiers of these slots, with `LONG` in the first of them alone."""

    def build(*slots, **sizes):
        rig = engine(tiers=slots or (40,), **sizes)
        for name, prompt in (("first", LONG), ("second", OTHER), ("third", MORE)):
            ask(rig, name, prompt)
            finish(rig)
        assert len(rig.core.pool.prefix_cache.match(hashes(rig, LONG), 9)) < 9
        return rig

    return build


def test_a_prefix_that_left_the_pool_is_read_and_counts_as_a_hit(tiered):
    rig = tiered()
    ask(rig, "again", LONG)
    assert rig.core.pool.counts()["receiving"] > 0
    finish(rig)
    first = rig.tokens("again")[0]
    check_answer(rig, "again", LONG)
    assert first.cached_tokens == 36
    assert first.tier_read.choice == "read"
    assert first.tier_read.num_tokens > 0
    assert rig.stats.tier_reads["read"] == 1
    assert rig.stats.tiers[0].loaded_bytes > 0


def test_others_go_on_while_one_waits_for_its_blocks(tiered):
    rig = tiered()
    ask(rig, "reads", LONG)
    ask(rig, "short", [1, 2, 3])
    rig.run()
    check_answer(rig, "short", [1, 2, 3])
    assert rig.token_ids("reads") == []
    finish(rig)
    check_answer(rig, "reads", LONG)


def test_requests_of_one_prefix_wait_for_one_read(tiered):
    rig = tiered(num_blocks=24)
    ask(rig, "one", LONG)
    num_queued = len(rig.tiers.queued)
    ask(rig, "two", [*LONG, 7])
    assert len(rig.tiers.queued) == num_queued
    finish(rig)
    check_answer(rig, "one", LONG)
    check_answer(rig, "two", [*LONG, 7])
    assert rig.tokens("two")[0].cached_tokens >= 36


def test_a_read_takes_no_blocks_that_were_read_for_a_request_before_it(tiered):
    rig = tiered()  # whose blocks hold one of these prompts
    ask(rig, "one", LONG, max_tokens=1)
    rig.clock.advance(0.1)
    ask(rig, "two", OTHER, max_tokens=1)
    rig.tiers.copy()
    rig.step()
    assert len(rig.token_ids("one")) == 1
    finish(rig)
    assert [rig.tokens(name)[0].cached_tokens for name in ("one", "two")] == [36, 36]


def test_a_receive_reads_into_no_blocks_that_are_kept_for_a_prompt_that_waits(tiered):
    rig = tiered()
    ask(rig, "runs", list(range(300, 330)), max_tokens=20)
    rig.tiers.copy()
    ask(rig, "waits", list(range(400, 440)))
    rig.handle(m.Receive(make_spec("received", LONG[:20])))
    assert rig.core.pool.counts()["receiving"] == 0
    assert [each.request_id for each in rig.of(m.ReceiveRefused)] == ["received"]
    finish(rig)
    check_answer(rig, "waits", list(range(400, 440)))


def test_a_disk_that_does_not_answer_keeps_no_request_waiting(tiered):
    rig = tiered(num_blocks=24)
    ask(rig, "waits", LONG)
    assert rig.core.next_wake_seconds() == STUCK_SECONDS
    rig.clock.advance(STUCK_SECONDS)
    rig.run()
    rig.step()
    rig.run()
    check_answer(rig, "waits", LONG)
    num_unread = rig.core.pool.counts()["quarantined"]
    assert num_unread > 0

    ask(rig, "next", OTHER)  # takes no more blocks out of the pool
    rig.run()
    check_answer(rig, "next", OTHER)
    assert rig.core.pool.counts()["quarantined"] == num_unread

    finish(rig)  # it answers
    assert rig.core.pool.counts()["quarantined"] == 0
    rig.clock.advance(1.0)  # it is tried again
    ask(rig, "away", list(range(700, 780)))
    finish(rig)
    ask(rig, "again", OTHER)
    assert rig.core.pool.counts()["receiving"] > 0


def test_a_disk_that_hangs_on_writes_holds_a_part_of_the_pool_and_is_seen(engine):
    rig = engine(tiers=(40,), num_blocks=24)
    for name, prompt in (("first", LONG), ("second", OTHER), ("third", MORE)):
        ask(rig, name, prompt)
        rig.run()
        check_answer(rig, name, prompt)
    held = [copy.source.slot for copy in rig.tiers.queued]
    assert 0 < len(held) <= 24 // HELD_SHARE
    assert rig.core.next_wake_seconds() == STUCK_SECONDS
    rig.clock.advance(STUCK_SECONDS)
    rig.step()
    assert rig.stats.tiers[0].reason == "it does not answer"
    assert rig.core.next_wake_seconds() == STUCK_SECONDS

    ask(rig, "fourth", list(range(700, 740)))
    rig.run()
    check_answer(rig, "fourth", list(range(700, 740)))
    assert [copy.source.slot for copy in rig.tiers.queued] == held
    assert set(held) <= set(rig.core._tiers.held())

    rig.clock.advance(1.0)
    finish(rig)  # it answers
    assert rig.stats.tiers[0].reason == ""
    assert set(rig.core._tiers.held()) == set()


def test_blocks_in_use_are_saved_though_cached_ones_before_them_cannot_be_kept(engine):
    rig = engine(tiers=(40,), num_blocks=24)
    tiers = rig.core._tiers
    rig.tiers.full = {0}
    ask(rig, "first", LONG)
    finish(rig)  # leaves cached blocks that are not saved
    rig.tiers.full = set()
    tiers.tiers[0].fullness.end()
    before = [key for _, key in rig.core.pool.prefix_cache.unsaved(100)]
    assert len(before) > 24 // HELD_SHARE
    save = tiers.save
    tiers.save = lambda num_spare: save(0)
    ask(rig, "second", OTHER, max_tokens=8)
    rig.run()
    finish(rig)
    saved = set(tiers.tiers[0].slots)
    assert saved & set(hashes(rig, OTHER))
    assert not saved & set(before)


def test_a_receive_that_waits_for_a_disk_goes_on_without_it(tiered):
    rig = tiered(num_blocks=24)
    rig.handle(m.Receive(make_spec("received", LONG)))
    assert rig.of(m.ReceiveReady) == []
    rig.clock.advance(STUCK_SECONDS)
    rig.step()
    assert [each.cached_tokens < 36 for each in rig.of(m.ReceiveReady)] == [True]


def test_an_abort_cancels_the_read_and_its_blocks_are_free_once_that_is_answered(tiered):
    rig = tiered()
    ask(rig, "gone", LONG)
    num_reading = rig.core.pool.counts()["receiving"]
    rig.handle(m.Abort("gone"))
    assert rig.core.pool.counts()["quarantined"] == num_reading > 0
    finish(rig)
    assert rig.tiers.num_cancelled == num_reading
    assert rig.core.pool.counts()["quarantined"] == 0


def test_a_read_goes_on_while_another_request_waits_for_it(tiered):
    rig = tiered(num_blocks=24)
    ask(rig, "gone", LONG)
    ask(rig, "stays-here", LONG)
    rig.handle(m.Abort("gone"))
    assert rig.core.pool.counts()["quarantined"] == 0
    finish(rig)
    check_answer(rig, "stays-here", LONG)


def test_a_damaged_block_is_a_miss_and_what_follows_it_is_computed(tiered):
    rig = tiered()
    rig.tiers.next_outcome = "damaged"
    ask(rig, "again", LONG)
    finish(rig)
    check_answer(rig, "again", LONG)
    assert rig.stats.tiers[0].damaged == 1


def test_a_read_that_brought_no_block_counts_as_lost(tiered):
    rig = tiered()
    ask(rig, "again", LONG)
    num_read = rig.core.pool.counts()["receiving"]
    for _ in range(num_read):
        rig.tiers.next_outcome = "damaged"
        rig.tiers.copy(1)
    finish(rig)
    check_answer(rig, "again", LONG)
    reads = rig.stats.tier_reads
    assert (reads["lost"], reads["read"], reads["slow"]) == (1, 0, 0)
    first = rig.tokens("again")[0].tier_read
    assert (first.choice, first.num_tokens) == ("lost", 0)


def test_a_tier_that_is_full_takes_no_more_and_is_still_read(tiered):
    rig = tiered()
    rig.tiers.full = {0}
    ask(rig, "fourth", list(range(200, 240)))
    finish(rig)
    saved = rig.stats.tiers[0].saved_bytes
    assert rig.stats.tiers[0].reason == "no space"
    ask(rig, "again", LONG)
    finish(rig)
    check_answer(rig, "again", LONG)
    assert rig.stats.tiers[0].loaded_bytes > 0
    assert rig.stats.tiers[0].saved_bytes == saved


def test_a_tier_that_was_full_is_tried_again_by_one_block_at_a_time(tiered):
    rig = tiered()
    rig.tiers.full = {0}
    ask(rig, "fourth", list(range(200, 240)))
    finish(rig)
    rig.clock.advance(1.0)
    ask(rig, "fifth", list(range(300, 340)))
    rig.run()
    assert len(rig.tiers.queued) == 1
    finish(rig)
    rig.tiers.full = set()
    rig.clock.advance(2.0)
    ask(rig, "sixth", list(range(400, 440)))
    finish(rig)
    assert rig.stats.tiers[0].reason == ""


def test_a_prefix_is_computed_where_reading_is_measured_to_be_slower(tiered):
    rig = tiered()
    rig.tiers.seconds = 50.0
    rig.runner.on_execute = lambda: rig.clock.advance(0.1)
    ask(rig, "measured", LONG)
    finish(rig)
    ask(rig, "away", OTHER)
    finish(rig)
    num_read = rig.stats.tier_reads["read"] + rig.stats.tier_reads["slow"]
    ask(rig, "again", LONG)
    assert not rig.core._tiers.num_reading
    finish(rig)
    read = rig.tokens("again")[0].tier_read
    assert read.choice == "compute"
    assert read.expected_seconds > read.compute_seconds > 0.0
    assert rig.stats.tier_reads["computed"] >= 1
    assert rig.stats.tier_reads["read"] + rig.stats.tier_reads["slow"] == num_read


def test_reading_is_tried_again_once_its_rate_is_old(tiered):
    rig = tiered()
    rig.tiers.seconds = 50.0
    rig.runner.on_execute = lambda: rig.clock.advance(0.1)
    for name, prompt in (("measured", LONG), ("away", OTHER)):
        ask(rig, name, prompt)
        finish(rig)
    rig.clock.advance(61.0)
    ask(rig, "again", LONG)
    assert rig.core._tiers.num_reading


def test_a_block_moves_on_to_the_next_tier_before_it_is_evicted(tiered):
    rig = tiered(12, 60)
    for start in (200, 300, 400):
        ask(rig, f"more{start}", list(range(start, start + 40)))
        finish(rig)
    first, second = rig.core._tiers.tiers
    assert not all(key in first.slots for key in hashes(rig, LONG)[:9])
    assert all(key in second.slots for key in hashes(rig, LONG)[:5])
    ask(rig, "again", LONG)
    finish(rig)
    check_answer(rig, "again", LONG)
    assert "tier1" in rig.tokens("again")[0].tier_read.tiers


def test_peers_learn_of_a_block_until_it_is_in_no_tier(tiered):
    rig = tiered(10)
    known = set()
    for event in rig.of(m.BlockEvents):
        known = (known - set(event.removed)) | set(event.stored)
    tiers = rig.core._tiers
    in_pool = set(rig.core.pool.prefix_cache._block_ids)
    assert known == in_pool.union(tiers.tiers[0].slots)
    assert len(tiers.tiers[0].slots) == 10


def test_both_sides_of_a_remote_prefill_read_from_their_tiers(pair):
    both = pair(decode={"tiers": (40,)}, prefill={"tiers": (40,)})
    for rig in (both.decode, both.prefill):
        for name, prompt in (("first", LONG), ("second", OTHER)):
            ask(rig, f"{name}-{id(rig)}", prompt)
            finish(rig)
    prompt = [*LONG, *range(500, 512)]
    both.decode.handle(m.Receive(make_spec("a", prompt, 4)))
    assert both.decode.of(m.ReceiveReady) == []
    both.decode.tiers.copy()
    both.decode.step()
    ready = both.decode.of(m.ReceiveReady)[-1]
    assert ready.cached_tokens == 40
    target = TransferTarget(
        ready.epoch, "decode", ["nowhere"], ready.cached_tokens, ready.block_ids
    )
    both.prefill.handle(m.Prefill(make_spec("a", prompt, 4), target))
    assert both.prefill.core.pool.counts()["receiving"] > 0
    both.prefill.tiers.copy()
    both.prefill.step()
    both.finish()
    both.check(prompt, 4)
    assert both.prefill.tokens("a")[0].cached_tokens == 40


def test_a_receive_that_is_aborted_while_it_reads_leaves_nothing(pair):
    both = pair(decode={"tiers": (40,)})
    for name, prompt in (("first", LONG), ("second", OTHER)):
        ask(both.decode, name, prompt)
        finish(both.decode)
    both.decode.handle(m.Receive(make_spec("a", LONG, 4)))
    both.decode.handle(m.Abort("a"))
    finish(both.decode)
    assert both.decode.of(m.ReceiveReady) == []
    assert both.decode.core.pool.counts()["quarantined"] == 0


def test_slots_are_reused_the_least_recently_used_first_but_not_while_they_are_read():
    slots = TierSlots(2)
    for key in (b"a", b"b"):
        slots.commit(slots.reserve(key).slot)
    reading = slots.acquire(b"a", is_use=False)
    assert slots.reserve(b"c").evicted == b"b"
    assert slots.reserve(b"d") is None
    slots.remove(b"a")
    assert slots.counts() == {"free": 0, "writing": 1, "stored": 0, "removed": 1}
    slots.release(reading)
    slots.check()
    assert slots.reserve(b"d").evicted is None


def test_slots_of_an_earlier_run_are_taken_over():
    slots = TierSlots(3)
    for slot, key in ((2, b"old"), (0, b"new")):
        slots.restore(slot, key)
    slots.restored()
    slots.check()
    assert slots.reserve(b"more") == (1, None)
    assert slots.reserve(b"most").evicted == b"old"
