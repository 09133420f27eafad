"""A store that engines share: found by asking, and never waited for longer than it pays."""

import pytest

from pdcluster_worker.engine import block_pool
from pdcluster_worker.engine.store_lookups import LOOKUP_SECONDS
from pdcluster_worker.engine.tier import SHARED_STUCK_SECONDS
from pdcluster_worker.messages import engine as m
from tests.worker.engine.conftest import make_spec
from tests.worker.engine.tiered import LONG, MORE, OTHER, ask, check_answer, finish, hashes

SMALL = {"tiers": (4,), "num_blocks": 24}


@pytest.fixture
def store():
    return {}


@pytest.fixture
def reader(engine, store):
    """An engine with nothing of its own, and a store in which another has put `LONG`."""
    writer = engine(store=store, tiers=(40,), num_blocks=24)
    ask(writer, "first", LONG)
    finish(writer)
    assert set(hashes(writer, LONG)) <= set(store)
    return engine(store=store, **SMALL)


def settle(rig):
    """Answers and steps until a request reads or runs."""
    rig.tiers.copy(0)
    rig.step()


def test_an_engine_reads_what_another_has_computed(reader):
    ask(reader, "mine", LONG)
    assert reader.core.pool.counts()["receiving"] == 0
    settle(reader)
    assert reader.core.pool.counts()["receiving"] == 9
    finish(reader)
    check_answer(reader, "mine", LONG)
    first = reader.tokens("mine")[0]
    assert first.cached_tokens == 36
    assert (first.tier_read.choice, first.tier_read.tiers) == ("read", "shared")
    assert reader.stats.tier_lookups["found"] == 1


def test_others_go_on_while_one_waits_for_an_answer(reader):
    ask(reader, "asks", LONG)
    ask(reader, "short", [1, 2, 3])
    reader.run()
    check_answer(reader, "short", [1, 2, 3])
    assert reader.token_ids("asks") == []
    assert reader.stats.num_waiting == 1
    finish(reader)
    check_answer(reader, "asks", LONG)


def test_a_prompt_that_no_one_has_computed_is_computed_after_one_lookup(reader):
    ask(reader, "new", OTHER)
    finish(reader)
    check_answer(reader, "new", OTHER)
    assert reader.stats.tier_lookups["absent"] == 1
    assert reader.tokens("new")[0].cached_tokens == 0


def test_a_block_that_others_delete_is_a_miss_and_not_damage(reader, store):
    ask(reader, "mine", LONG)
    settle(reader)
    del store[hashes(reader, LONG)[3]]
    finish(reader)
    check_answer(reader, "mine", LONG)
    assert reader.tokens("mine")[0].cached_tokens == 12
    assert (reader.stats.tiers[-1].absent, reader.stats.tiers[-1].damaged) == (1, 0)


def test_a_store_that_does_not_answer_keeps_a_request_for_a_moment_and_is_left_alone(reader):
    ask(reader, "waits", LONG)
    assert reader.core.next_wake_seconds() == LOOKUP_SECONDS
    reader.clock.advance(LOOKUP_SECONDS)
    reader.run()
    reader.step()
    reader.run()
    check_answer(reader, "waits", LONG)
    assert reader.stats.tier_lookups["late"] == 1
    assert "no answer" in reader.stats.tiers[-1].reason

    ask(reader, "next", MORE)
    reader.run()
    check_answer(reader, "next", MORE)
    assert len(reader.tiers.lookups) == 1  # the first, still unanswered


def test_a_store_that_refuses_is_tried_again_after_a_pause_by_one_request(reader):
    reader.tiers.refuses = "connection refused"
    ask(reader, "refused", LONG)
    finish(reader)
    check_answer(reader, "refused", LONG)
    assert reader.stats.tiers[-1].reason == "connection refused"
    assert reader.stats.tier_lookups["failed"] == 1

    reader.tiers.refuses = ""
    reader.clock.advance(1.0)
    ask(reader, "tries", OTHER)
    ask(reader, "does-not", MORE)
    assert len(reader.tiers.lookups) == 1
    finish(reader)
    assert reader.stats.tiers[-1].reason == ""
    for name, prompt in (("tries", OTHER), ("does-not", MORE)):
        check_answer(reader, name, prompt)


def test_a_read_that_is_stuck_is_given_up_and_counted(reader):
    ask(reader, "waits", LONG)
    settle(reader)
    reader.clock.advance(SHARED_STUCK_SECONDS)
    reader.step()
    reader.run()
    check_answer(reader, "waits", LONG)
    assert reader.stats.tier_reads["given_up"] == 1
    assert reader.core.pool.counts()["quarantined"] > 0
    finish(reader)
    assert reader.core.pool.counts()["quarantined"] == 0


def test_a_store_that_answers_slowly_is_given_up_once_computing_is_long_done(reader):
    reader.runner.on_execute = lambda: reader.clock.advance(0.01)
    ask(reader, "measures", OTHER)
    finish(reader)
    ask(reader, "waits", LONG)
    settle(reader)
    for _ in range(9):
        reader.tiers.copy(1)
        reader.clock.advance(0.9)
        reader.step()
    reader.run()
    check_answer(reader, "waits", LONG)
    assert reader.stats.tier_reads["given_up"] == 1
    assert 0 < reader.tokens("waits")[0].cached_tokens < 36


def test_a_block_that_a_store_did_not_take_is_put_again(engine, store):
    rig = engine(store=store, tiers=(40,))
    ask(rig, "first", LONG)
    rig.tiers.full = {1}
    finish(rig)
    assert rig.stats.tiers[1].reason == "no space"
    assert not store
    rig.tiers.full = set()
    rig.clock.advance(1.0)
    rig.step()
    finish(rig)
    assert set(hashes(rig, LONG)) <= set(store)


def hang(rig):
    """All copies to and from the store, which are answered no more, nor are lookups."""
    stuck = [copy for copy in rig.tiers.queued if 1 in (copy.source.tier, copy.target.tier)]
    for copy in stuck:
        rig.tiers.queued.remove(copy)
    return len(stuck)


def test_a_store_that_hangs_leaves_the_host_tier_as_it_is(engine, store):
    rig = engine(store=store, tiers=(200,))
    last = []
    for number in range(30):
        last = list(range(1000 * number, 1000 * number + 40))
        ask(rig, f"ask{number}", last)
        for _ in range(20):
            hang(rig)
            rig.tiers.copy()
            rig.step()
    assert not store
    assert set(hashes(rig, last)[:9]) <= set(rig.core._tiers.tiers[0].slots)


def test_writes_that_do_well_do_not_end_a_pause_of_lookups(reader):
    reader.tiers.refuses = "connection refused"
    ask(reader, "refused", LONG)
    finish(reader)
    reader.clock.advance(1.0)
    reader.step()
    finish(reader)
    stats = reader.core._tiers.take_stats()[-1]
    assert stats.saved_bytes > 0
    assert stats.reason == "connection refused"


def test_a_store_that_hangs_is_not_tried_again_before_it_answers(reader):
    ask(reader, "waits", LONG)
    for number in range(9):
        reader.clock.advance(31.0)
        reader.run()
        ask(reader, f"next{number}", list(range(100 * number, 100 * number + 40)))
    reader.run()
    assert len(reader.tiers.lookups) == 1
    finish(reader)
    ask(reader, "then", OTHER)
    assert len(reader.tiers.lookups) == 1
    finish(reader)
    assert reader.stats.tiers[-1].reason == ""


def test_a_stuck_read_is_given_up_in_time_though_a_lookup_has_failed_meanwhile(reader):
    ask(reader, "waits", LONG)
    settle(reader)
    reader.clock.advance(0.4)
    ask(reader, "asks", OTHER)
    reader.clock.advance(LOOKUP_SECONDS)
    reader.step()
    assert reader.stats.tier_lookups["late"] == 1
    reader.handle(m.Abort("asks"))
    reader.step()
    left = SHARED_STUCK_SECONDS - 0.4 - LOOKUP_SECONDS
    assert reader.core.next_wake_seconds() == pytest.approx(left)
    reader.clock.advance(left)
    reader.run()
    check_answer(reader, "waits", LONG)


def test_both_kinds_of_salt_ask_for_keys_of_their_own(reader):
    spec = make_spec("salted", LONG)
    reader.handle(m.Submit(type(spec)(**{**as_dict(spec), "cache_salt": b"tenant"})))
    finish(reader)
    assert reader.stats.tier_lookups == {"found": 0, "absent": 1, "late": 0, "failed": 0}
    assert reader.tokens("salted")[0].cached_tokens == 0


def as_dict(spec):
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def test_peers_learn_what_a_lookup_has_found(reader):
    ask(reader, "mine", LONG)
    finish(reader)
    known = set()
    for event in reader.of(m.BlockEvents):
        known = (known - set(event.removed)) | set(event.stored)
    assert set(hashes(reader, LONG)[:9]) <= known


def test_a_receive_asks_and_reads_before_it_reserves(reader):
    reader.handle(m.Receive(make_spec("received", LONG)))
    settle(reader)
    assert reader.of(m.ReceiveReady) == []
    reader.tiers.copy()
    reader.step()
    assert [each.cached_tokens for each in reader.of(m.ReceiveReady)] == [36]


def test_hashes_of_a_large_tier_are_reported_in_parts_though_nothing_else_is_to_do(
    reader, monkeypatch
):
    monkeypatch.setattr(block_pool, "MOST_HASHES", 4)
    ask(reader, "mine", LONG)
    finish(reader)
    reader.handle(m.AskSnapshot())
    num_parts = 1
    while reader.core.next_wake_seconds() == 0.0:
        reader.step()
        num_parts += 1
    assert num_parts >= 3
    parts = reader.of(m.BlockEvents)[-num_parts:]
    assert [part.is_cleared for part in parts] == [True] + [False] * (num_parts - 1)
    assert {key for part in parts for key in part.stored} >= set(hashes(reader, LONG)[:9])
