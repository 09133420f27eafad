"""Workers of flexible pools change their role where budget stops the other one from growing."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.explain import explained, read_record, summary, write_record
from pdcluster_api.plan.autoscale.values import FlipMemory, Memory
from pdcluster_api.plan.observed.state import Flipped
from tests.operator.pdcluster_api.plan.autoscale.flip_world import FlipWorld
from tests.operator.pdcluster_api.plan.autoscale.worlds import D, P, make_spec, pool

BUSY, SPARE = 2.5, 0.5  # workers' worth of work


def flexible(number: int, low: int = 1, high: int = 8) -> dict[str, Any]:
    return pool(number, minReplicas=low or None, maxReplicas=high, flexible=True)


def world(
    prefill: int = 3,
    decode: int = 2,
    *,
    load: tuple[float, float] = (SPARE, BUSY),
    lows: tuple[int, int] = (1, 1),
    total: int | None = None,
    drain_seconds: float = 20.0,
    **autoscale: Any,
) -> FlipWorld:
    """Decode needs more than it has, and the budget has no room."""
    budget = {"total": prefill + decode if total is None else total}
    spec = make_spec(
        prefill=[flexible(prefill, lows[0])],
        decode=[flexible(decode, lows[1])],
        budget=budget,
        **autoscale,
    )
    loads = dict(zip(("prefill", "decode"), load, strict=True))
    return FlipWorld(spec, {P: prefill, D: decode}, loads, drain_seconds=drain_seconds)


def test_budget_that_stops_a_role_lets_a_worker_of_the_other_change_to_it():
    found = world().run(100)
    assert found.flipped == Flipped(P, D, 1)
    assert found.sizes == {P: 3, D: 2}
    assert (found.serving(P), found.serving(D)) == (2, 3)
    decision = next(each for each in found.outcomes if each.decision.flipped).decision
    assert summary(decision) == "prefill/x 3 to 2, decode/x 2 to 3, a worker changes its role"
    assert read_record(write_record(decision)) == decision
    results = {row[0]: row[3:] for row in explained(decision) if row[1] == "result"}
    text = "1 worker of prefill/x serves as decode/x"
    assert results == {"prefill": ("2", f"x 2; {text}"), "decode": ("3", f"x 3; {text}")}


def test_decode_worker_changes_to_prefill_likewise():
    found = world(2, 3, load=(BUSY, SPARE)).run(100)
    assert found.flipped == Flipped(D, P, 1)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(world(total=8), id="the-budget-has-room"),
        pytest.param(world(lows=(3, 1)), id="at-its-minimum"),
        pytest.param(world(1, 2), id="its-last-worker"),
        pytest.param(world(load=(2.1, BUSY)), id="it-needs-them"),
        pytest.param(world(ratio={"min": 1.2}), id="the-ratio-would-break"),
    ],
)
def test_no_worker_changes_its_role_where(found: FlipWorld):
    assert found.run(280).flipped is None


def test_last_ready_worker_of_a_role_keeps_it():
    found = world(2, 2, load=(BUSY, SPARE))
    found.since[D][1] = math.inf  # evicted, and no node takes it
    assert found.run(280).flipped is None
    found.since[D][1] = found.now - found.start_seconds
    assert found.run(100).flipped == Flipped(D, P, 1)


def test_worker_of_the_other_role_stays_while_it_is_the_last_ready_one():
    found = world(lows=(2, 1)).run(150)
    assert found.flips == 1
    found.since[D][:] = [math.inf] * 2
    found.load = {"prefill": SPARE, "decode": SPARE}
    assert found.run(490).flips == 1
    found.since[D][0] = found.now - found.start_seconds
    assert found.run(400).flips == 0


@pytest.mark.parametrize("host_ready", [1, 2])
def test_role_without_a_ready_worker_gets_its_flipped_one_back(host_ready: int):
    found = world(2, 2, scaleDown={"windowSeconds": 3600}).run(100)
    assert found.flips == 1
    found.run(30)
    found.since[P][1] = math.inf
    found.since[D][:] = [-math.inf if each < host_ready - 1 else math.inf for each in range(2)]
    outcome = found.decide()
    assert found.flips == (0 if host_ready > 1 else 1)
    if host_ready > 1:
        assert "prefill has no ready worker" in outcome.decision.steps[-1].why


@pytest.mark.parametrize(("prefill_load", "flips"), [(SPARE, 1), (2.1, 0)])
def test_queue_for_blocks_of_decode_keeps_no_prefill_worker(prefill_load: float, flips: int):
    found = world(load=(prefill_load, BUSY))
    found.waits_for_blocks = True
    assert found.run(100).flips == flips


@pytest.mark.parametrize(("total", "at"), [(3, 180), (8, 185)], ids=["full", "with-room"])
def test_worker_that_would_go_changes_to_the_role_that_grows_at_once(total: int, at: int):
    found = world(2, 1, load=(SPARE, 0.5), total=total, scaleDown={"windowSeconds": 200}).run(at)
    assert (found.sizes, found.flips) == ({P: 2, D: 1}, 0)
    found.load = {"prefill": SPARE, "decode": 1.9}
    found.run(25)
    assert (found.sizes, found.flips) == ({P: 2, D: 1}, 1)
    decision = next(each for each in found.outcomes if each.decision.flipped).decision
    assert summary(decision) == "prefill/x 2 to 1, decode/x 1 to 2, a worker changes its role"
    assert "prefill shrinks to 1" in decision.steps[-1].why


def test_no_worker_changes_its_role_while_a_roll_out_runs():
    found = world()
    found.may_flip = False
    assert found.run(280).flipped is None
    found.may_flip = True
    assert found.run(10).flipped == Flipped(P, D, 1)


def test_need_has_to_last_without_a_pause():
    found = world().run(50)
    found.load = {"prefill": SPARE, "decode": 1.0}
    found.run(15)
    found.load = {"prefill": SPARE, "decode": BUSY}
    assert found.run(50).flipped is None
    assert found.run(50).flipped == Flipped(P, D, 1)


def test_slow_drain_lets_the_next_one_wait_longer():
    found = world(4, 2, load=(SPARE, 6.0), drain_seconds=100.0).run(80)
    assert found.flips == 1
    found.run(100)  # it drains
    assert found.is_flipping is False
    assert found.run(180).flips == 1
    assert found.memory.flips.seconds == pytest.approx(100.0, abs=6.0)
    assert found.run(60).flips == 2


def test_one_worker_at_a_time_changes_its_role():
    found = world(4, 2, load=(SPARE, 6.0), drain_seconds=1000.0, scaleDown={"windowSeconds": 3600})
    assert found.run(900).flips == 1
    assert found.run(2200).flips == 2


def test_worker_that_does_not_drain_keeps_its_role():
    found = world(drain_seconds=2000.0).run(100)
    assert found.flips == 1
    found.run(550)
    assert found.flips == 1
    found.run(20)
    assert found.flips == 0
    whys = [step.why for each in found.outcomes for step in each.decision.steps]
    assert "a worker of prefill keeps its role: it has not drained within 600 s" in whys
    found.run(3500)
    assert found.flips == 0  # for an hour, or it would drain for most of the time


def test_role_that_needs_no_more_gives_the_worker_back_before_it_shrinks():
    found = world(lows=(2, 1)).run(150)
    assert found.flips == 1
    found.load = {"prefill": SPARE, "decode": SPARE}
    found.run(290)
    assert found.flips == 1
    found.run(200)
    assert (found.flips, found.sizes[D]) == (0, 2)
    assert found.serving(P) == 3


def test_role_below_its_minimum_gets_its_worker_back_at_once():
    found = world().run(150)
    assert found.flips == 1
    raised = world(lows=(3, 1)).spec
    found.spec = raised
    outcome = found.decide()
    assert outcome.decision.flipped is None
    assert "a worker of prefill takes its own role again" in outcome.decision.steps[-1].why


def test_needs_that_turn_round_bring_the_worker_back_and_then_another():
    found = world(3, 3, load=(SPARE, 2.9)).run(150)
    assert found.flips == 1
    found.load = {"prefill": 2.9, "decode": SPARE}
    found.run(260)
    assert found.flips == 0
    found.run(100)
    assert found.flips == -1


def test_budget_that_is_cut_leaves_each_role_a_worker_of_its_own():
    found = world(4, 1, load=(SPARE, 6.0)).run(600)
    assert found.flips >= 2
    found.spec = world(4, 1, load=(SPARE, 6.0), total=2).spec
    found.run(300)
    assert found.sizes == {P: 1, D: 1}
    assert found.flips == 0


def test_without_its_memory_a_decision_waits_again():
    found = world().run(50)
    found.memory = Memory()
    assert found.run(50).flipped is None
    assert found.memory.flips == FlipMemory(request=("decode", found.memory.flips.request[1]))


LOADS = st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 6.0), st.integers(1, 60))


@pytest.mark.timeout(900)  # 50 s of one free core; three processes may share two with others
@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    lows=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    loads=st.lists(LOADS, min_size=1, max_size=6),
    drain=st.sampled_from([5.0, 40.0, 200.0]),
)
def test_walk_keeps_minima_budget_and_one_change_at_a_time_and_comes_to_rest(
    sizes, lows, loads, drain
):
    lows = tuple(min(low, size) for low, size in zip(lows, sizes, strict=True))
    found = world(*sizes, lows=lows, drain_seconds=drain)
    for prefill, decode, rounds in (*loads, (loads[-1][0], loads[-1][1], 720)):
        found.load = {"prefill": prefill, "decode": decode}
        for _ in range(rounds):
            before, was_flipping = found.flips, found.is_flipping
            found.run(5)
            assert abs(found.flips - before) <= (0 if was_flipping else 1)
            assert sum(found.sizes.values()) <= sum(sizes)
            for key, low in zip((P, D), lows, strict=True):
                assert found.serving(key) >= max(1, low)
                assert found.sizes[key] > max(0, found.away(key))
    assert not any(outcome.changed for outcome in found.outcomes[-180:])
