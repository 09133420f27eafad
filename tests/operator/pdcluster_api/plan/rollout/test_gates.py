"""Gates of a rolling roll out on simulated clusters: what passes, waits, goes back and goes on."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.gates import read_gate
from pdcluster_api.plan.observed.state import Attainment, RevisionLatency
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import at_revision, revision_of, template_name
from tests.operator.pdcluster_api.plan.clusters import condition_of
from tests.operator.pdcluster_api.plan.rollout.gated_cluster import BUSY, GatedCluster, gated
from tests.operator.pdcluster_api.plan.simulated import assert_as_declared

BAKE = 60
PAUSE: dict[str, Any] = {"on_failure": "Pause", "bake_seconds": BAKE}
BACK: dict[str, Any] = {"on_failure": "Rollback", "bake_seconds": BAKE}
OLD = gated()
A, B = revision_of(OLD.spec), revision_of(gated(65).spec)
WHOLE = {"prefill": 2, "decode": 2}


SETTLED = GatedCluster()
SETTLED.walk(OLD)


def begun(new: str = "") -> GatedCluster:
    """new: fault of the new revision"""
    existing = deepcopy(SETTLED)
    existing.faults = {B: new} if new else {}
    return existing


def message(existing: GatedCluster, kind: str = "Ready") -> str:
    return str(condition_of(existing.status, kind).get("message", ""))


def until(existing: GatedCluster, cluster: PDCluster, gate: tuple[str, int]) -> None:
    for _ in range(60):
        existing.round(cluster)
        if existing.gate == gate:
            return
    raise AssertionError(f"{gate} never came: {existing}")


def test_each_step_stays_ready_for_its_time_and_is_verified_before_the_next():
    existing, new = begun(), gated(65, **PAUSE)
    times: dict[tuple[str, int], int] = {}
    for plan in existing.walk(new):
        found = read_gate(plan.status)
        if found is not None:
            times.setdefault((found.state, found.passed), existing.seconds)
        sizes = {each.id: each.replicas for each in plan.workloads}
        assert sum(sizes.values()) <= 6

    assert list(times) == [
        ("Waiting", 0),
        ("Baking", 0),
        ("Waiting", 1),
        ("Baking", 1),
        ("Waiting", 2),
    ]
    assert_as_declared(existing, new)
    assert "gate" not in existing.status
    assert existing.sizes(A) == {}


def test_without_gates_nothing_is_said_of_them():
    existing = begun()

    plans = existing.walk(gated(65))

    assert not any("gate" in plan.status for plan in plans)
    assert_as_declared(existing, gated(65))


@pytest.mark.parametrize("fault", ["damaged", "pair_refused", "tokens_differ"])
def test_damaged_kv_brings_the_old_workers_back_and_is_not_tried_again(fault: str):
    existing, new = begun(new=fault), gated(65, **BACK)

    plans = existing.walk(new)

    assert existing.sizes(A) == WHOLE
    assert existing.sizes(B) == {}
    assert (existing.service, existing.is_wide) == (A, False)
    assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)
    assert existing.condition("Ready") == ("False", words.ROLLED_BACK)
    assert existing.condition("Stalled") == ("True", words.ROLLED_BACK)
    assert f"revision {B} was rolled back to {A}: KVTransferVerified, " in message(existing)
    assert "the checksums differ" in message(existing)
    events = [event for plan in plans for event in plan.events]
    assert [event.warning for event in events if event.reason == words.ROLLED_BACK] == [True]
    assert not any(plan.events for plan in existing.walk(new))
    assert existing.sizes(B) == {}

    other = gated(66, **BACK)
    existing.walk(other)
    assert_as_declared(existing, other)
    assert existing.condition(words.ROLLED_BACK) == ("", "")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (1, 4), (2, 6), (4, 12)])
def test_a_prefill_worker_comes_with_the_first_step(prefill: int, decode: int):
    existing, new = GatedCluster(), gated(65, prefill, decode, **BACK)
    existing.walk(gated(64, prefill, decode))
    good = deepcopy(existing)
    existing.faults = {B: "damaged"}
    most = dict.fromkeys(WHOLE, 0)
    for plan in existing.walk(new):
        for each in plan.workloads:
            if each.id.revision == B:
                most[each.id.role] = max(most[each.id.role], each.replicas)
    assert most == {"prefill": 1, "decode": 1}
    assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)

    good.step_seconds = 60
    for plan in good.walk(new):
        sizes = dict.fromkeys(WHOLE, 0)
        for each in plan.workloads:
            sizes[each.id.role] += each.replicas
        assert prefill <= sizes["prefill"] <= prefill + 1
        assert decode <= sizes["decode"] <= decode + 1
    assert_as_declared(good, new)


def test_a_role_of_which_no_pair_is_ready_does_not_pass():
    existing, changed = begun(), gated(of_role={"decode": 32}, **PAUSE)
    template = template_name(changed.spec, "decode", A)
    new = at_revision(changed, A, {"decode": template})
    until(existing, new, ("Baking", 0))
    prefill = next(each for each in existing.pods if each.role == "prefill")
    existing.broken.add(A)
    existing.ended = {}
    for _ in range(2):
        existing.lose_readiness(prefill)

    existing.walk(new)

    assert existing.gate == ("Baking", 0)
    lacks = f"revision {A} has no ready prefill worker with a ready decode worker"
    assert lacks in message(existing)
    existing.broken.clear()
    existing.walk(new)
    assert existing.condition("Ready")[0] == "True"


def test_latencies_of_a_revision_that_prefills_by_decode_workers_are_not_compared():
    existing, new = begun(), gated(65, **BACK, min_requests=100)
    existing.attainment = SLOW
    existing.scale(("prefill", "cpu"), 0)

    existing.walk(new)

    assert existing.gate == ("", 0)  # it went through


@pytest.mark.parametrize("room", [0, 1])
def test_a_first_prefill_worker_comes_within_the_budget(room: int):
    fields = BACK if room else {**BACK, "max_surge": 0, "max_unavailable": 1}
    existing, new = GatedCluster(), gated(65, 1, 3, **fields)
    existing.walk(gated(64, 1, 3))
    budget = new.spec.autoscale.budget.model_copy(update={"total": 4 + room})
    autoscale = new.spec.autoscale.model_copy(update={"budget": budget})
    new = new.model_copy(update={"spec": new.spec.model_copy(update={"autoscale": autoscale})})
    existing.step_seconds = 60

    for plan in existing.walk(new):
        assert sum(each.replicas for each in plan.workloads) <= 4 + room
    assert_as_declared(existing, new)


@pytest.mark.parametrize("fault", ["transfer_failed", "not_connected"])
def test_a_transfer_that_failed_counts_when_it_fails_again(fault: str):
    existing, new = begun(), gated(65, **BACK)
    until(existing, new, ("Baking", 0))
    existing.faults = {B: fault}
    existing.round(new)
    existing.round(new)
    assert existing.gate == ("Baking", 0)

    existing.walk(new)

    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)


def test_a_busy_worker_whose_transfer_failed_once_holds_the_gate_and_no_more():
    existing, new = begun(), gated(65, on_failure="Rollback", bake_seconds=20)
    until(existing, new, ("Baking", 0))
    existing.faults, existing.step_seconds = {B: "transfer_failed"}, 4.0
    for _ in range(3):
        existing.round(new)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.GATE_UNKNOWN)
    assert "the checksums differ; it counts once it has failed 2 times" in message(existing)

    existing.faults.clear()
    plans = existing.walk(new)

    assert_as_declared(existing, new)
    assert all(due.even_if_busy for plan in plans[:5] for due in plan.verify)


def test_a_fault_in_the_last_step_brings_workers_back_of_which_none_is_left():
    existing, new = begun(), gated(65, **BACK, max_surge=0, max_unavailable=1)
    existing.step_seconds = 5
    until(existing, new, ("Baking", 1))
    for _ in range(4):
        existing.round(new)
    assert existing.sizes(A) == {"prefill": 0, "decode": 0}
    existing.ended = {
        pair: replace(each, at=existing.now, fault="damaged")
        for pair, each in existing.ended.items()
    }

    existing.walk(new, quiet_rounds=15)

    assert existing.sizes(A) == WHOLE
    assert existing.condition("Ready") == ("False", words.ROLLED_BACK)


def test_old_workers_stay_until_the_gate_of_their_step_has_passed():
    existing, new = begun(), gated(65, **BACK, max_surge="100%")
    until(existing, new, ("Baking", 0))

    existing.round(new)

    assert existing.sizes(A) == existing.sizes(B) == WHOLE
    existing.walk(new)
    assert_as_declared(existing, new)


def test_a_budget_of_one_worker_more_ends_all_the_same():
    existing, new = begun(), gated(65, **BACK)
    budget = new.spec.autoscale.budget.model_copy(update={"total": 5})
    autoscale = new.spec.autoscale.model_copy(update={"budget": budget})
    new = new.model_copy(update={"spec": new.spec.model_copy(update={"autoscale": autoscale})})

    for plan in existing.walk(new):
        assert sum(each.replicas for each in plan.workloads) <= 5

    assert_as_declared(existing, new)


def test_damaged_kv_pauses_until_a_user_goes_on():
    existing, new = begun(new="damaged"), gated(65, **PAUSE)
    existing.walk(new)
    assert existing.gate == ("Failed", 0)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.GATE_FAILED)
    assert existing.condition("Ready") == ("False", words.ROLLOUT_PAUSED)
    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {"prefill": 1, "decode": 1})

    existing.faults.clear()
    found = read_gate(existing.status)
    assert found is not None
    existing.command = f"resume {found.since}"
    existing.walk(new)

    assert_as_declared(existing, new)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("", "")


def scale(existing: GatedCluster, size: int) -> None:
    for role in WHOLE:
        existing.scale((role, "cpu"), size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_sleeps_at_a_gate_that_failed_wakes_with_old_workers(size: int):
    existing, new = begun(new="damaged"), gated(65, **PAUSE)
    existing.walk(new)
    scale(existing, 0)
    existing.walk(new)
    assert existing.sizes(A) == existing.sizes(B) == {"prefill": 0, "decode": 0}

    scale(existing, size)
    existing.walk(new)

    assert existing.gate == ("Failed", 0)
    assert existing.sizes(A) == {"prefill": size, "decode": size}
    assert existing.sizes(B) == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("unavailable", [1, 2])
def test_what_wakes_at_a_gate_comes_where_all_workers_may_be_missing(size: int, unavailable: int):
    existing, new = begun(), gated(65, **PAUSE, max_surge=0, max_unavailable=unavailable)
    scale(existing, 0)
    existing.walk(OLD)
    existing.walk(new)

    scale(existing, size)
    existing.walk(new)

    assert_as_declared(existing, new)


@pytest.mark.parametrize("rounds", [0, 3, 9])
def test_a_roll_out_waits_at_its_gate_while_all_sleep(rounds: int):
    existing = begun(new="damaged")
    new = gated(65, **BACK, progress_deadline_seconds=300)
    if rounds:
        existing.faults.clear()
        for _ in range(rounds):
            existing.round(new)
        existing.faults[B] = "damaged"
        existing.ended = {}
        scale(existing, 0)
    else:
        scale(existing, 0)
        existing.walk(OLD)
    existing.walk(new, quiet_rounds=30)
    assert existing.gate == ("Waiting", 0)
    assert existing.sizes(A) == existing.sizes(B) == {"prefill": 0, "decode": 0}
    assert existing.condition("Ready") == ("False", "RollingOut")
    assert "at its gate: no worker is asked for that could pass it" in message(existing)

    scale(existing, 2)
    existing.walk(new, quiet_rounds=15)

    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {})
    assert existing.condition("Ready") == ("False", words.ROLLED_BACK)


def test_growth_at_a_gate_that_failed_goes_to_the_old_workers():
    existing, new = begun(new="damaged"), gated(65, **PAUSE)
    existing.walk(new)

    scale(existing, 5)
    existing.walk(new)

    assert existing.sizes(A) == {"prefill": 4, "decode": 4}
    assert existing.sizes(B) == {"prefill": 1, "decode": 1}


def test_an_old_command_goes_past_no_later_gate():
    existing, new = begun(new="damaged"), gated(65, **PAUSE)
    existing.command = "resume 2025-01-01T00:00:00Z"

    existing.walk(new)

    assert existing.gate == ("Failed", 0)


@pytest.mark.parametrize(
    ("when", "reason"), [(None, words.GATE_UNKNOWN), ("Pause", words.GATE_UNKNOWN)]
)
def test_kv_that_cannot_be_verified_holds_it_until_it_is(when: str | None, reason: str):
    existing, new = begun(new=BUSY), gated(65, **PAUSE, when_unknown=when)
    existing.walk(new)
    assert existing.gate == ("Baking", 0)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", reason)
    assert "is not verified: no worker has answered yet" in message(existing)

    existing.faults.clear()
    existing.walk(new)

    assert_as_declared(existing, new)


def test_kv_that_cannot_be_verified_holds_nothing_where_the_user_says_so():
    existing, new = begun(new=BUSY), gated(65, **PAUSE, when_unknown="Continue")

    existing.walk(new)

    assert_as_declared(existing, new)


def test_workers_that_never_come_bring_the_old_ones_back_after_the_deadline():
    existing = begun()
    new = gated(65, **BACK, progress_deadline_seconds=300)
    until(existing, new, ("Waiting", 1))
    existing.broken.add(B)

    existing.walk(new, quiet_rounds=20)

    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.PROGRESS_DEADLINE_EXCEEDED)


def test_old_workers_that_drain_beyond_the_deadline_are_no_stall():
    existing = begun()
    new = gated(65, **BACK, progress_deadline_seconds=300)
    until(existing, new, ("Waiting", 1))
    existing.drains = False

    plans = existing.walk(new, quiet_rounds=25)

    assert "waits for 1 old" in message(existing)
    assert not any(condition_of(plan.status, "Stalled") for plan in plans)
    existing.drains = True
    existing.walk(new)
    assert_as_declared(existing, new)


def test_an_etcd_that_is_away_beyond_the_deadline_rolls_nothing_back():
    existing = begun()
    new = gated(65, **BACK, progress_deadline_seconds=300)
    until(existing, new, ("Waiting", 1))
    existing.discovery, answers = replace(existing.discovery, ready=0), existing.discovery
    existing.broken.add(B)

    plans = existing.walk(new, quiet_rounds=25)

    assert not any(condition_of(plan.status, words.ROLLED_BACK) for plan in plans)
    existing.discovery = answers
    existing.broken.clear()
    existing.walk(new)
    assert_as_declared(existing, new)


def test_a_bake_beyond_the_deadline_is_no_stall():
    existing = begun()
    new = gated(65, on_failure="Rollback", bake_seconds=400, progress_deadline_seconds=300)
    plans = existing.walk(new, quiet_rounds=25)

    assert_as_declared(existing, new)
    assert not any(condition_of(plan.status, "Stalled") for plan in plans)


def test_a_worker_that_fails_begins_the_time_of_its_gate_again():
    existing, new = begun(), gated(65, **PAUSE)
    until(existing, new, ("Baking", 0))
    for _ in range(2):
        existing.round(new)
    workload = next(each for each in existing.pods if (each.role, each.revision) == ("decode", B))
    existing.lose_readiness(workload)
    existing.round(new)
    assert existing.gate == ("Waiting", 0)
    until(existing, new, ("Baking", 0))
    began = existing.seconds
    until(existing, new, ("Waiting", 1))
    assert existing.seconds - began >= BAKE


@pytest.mark.parametrize("fields", [{}, {"min_requests": 100}])
def test_a_clock_that_is_set_back_holds_no_gate(fields: dict[str, Any]):
    existing, new = begun(), gated(65, **BACK, **fields)
    existing.attainment = latency(0.9, 0.2)
    until(existing, new, ("Baking", 0))
    existing.seconds -= 86400

    existing.walk(new)

    assert_as_declared(existing, new)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("state", ["Waiting", "Baking"])
def test_a_pause_holds_at_every_step_and_a_resume_goes_on(step: int, state: str):
    existing, new = begun(), gated(65, **PAUSE)
    until(existing, new, (state, step))
    existing.command = "pause"
    existing.walk(new)
    held = existing.sizes(B)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.PAUSED_BY_USER)
    assert held == {"prefill": step + 1, "decode": step + 1}
    assert existing.sizes(A) == {"prefill": 2 - step, "decode": 2 - step}

    existing.command = ""
    existing.walk(new)

    assert_as_declared(existing, new)


@pytest.mark.parametrize("rounds", range(6))
def test_a_pause_without_gates_lets_the_step_end_that_is_under_way(rounds: int):
    existing, new = begun(), gated(65)
    for _ in range(rounds):
        existing.round(new)
    began = existing.status.get("rollout", {}).get("step", 1)
    existing.command = "pause"

    existing.walk(new)

    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.PAUSED_BY_USER)
    assert existing.sizes(B) == {"prefill": began, "decode": began}
    existing.command = ""
    existing.walk(new)
    assert_as_declared(existing, new)
    assert "gate" not in existing.status


def test_a_command_that_cannot_be_read_holds_and_says_so():
    existing, new = begun(), gated(65)
    existing.command = "paus"

    existing.walk(new)

    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.PAUSED_BY_USER)
    assert "annotation pdcluster.io/rollout is 'paus', which is no command" in message(existing)


@pytest.mark.parametrize("command", ["pause", "paus"])
def test_a_pause_does_not_hold_the_way_back(command: str):
    existing, new = begun(), gated(65, **BACK)
    until(existing, new, ("Baking", 1))
    existing.command = command
    existing.ended = {
        pair: replace(each, at=existing.now, fault="damaged")
        for pair, each in existing.ended.items()
    }

    existing.walk(new, quiet_rounds=15)

    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {})
    assert existing.condition("Ready") == ("False", words.ROLLED_BACK)


@pytest.mark.parametrize("rounds", range(1, 28, 2))
@pytest.mark.parametrize("fields", [{}, PAUSE])
def test_an_undo_goes_back_from_every_step(rounds: int, fields: dict[str, Any]):
    existing, new = begun(), gated(65, **fields)
    existing.generation += 1
    for _ in range(rounds):
        existing.round(new)
    existing.command = f"undo {existing.generation}"
    existing.walk(new)

    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    # the command is of that generation alone
    existing.generation += 1
    existing.walk(OLD)
    existing.generation += 1
    existing.walk(new)
    assert_as_declared(existing, new)


def test_what_was_rolled_back_is_tried_again_where_a_user_asks_for_it():
    existing, new = begun(new="damaged"), gated(65, **BACK)
    existing.walk(new)
    existing.faults.clear()
    found = read_gate(existing.status)
    assert found is not None
    existing.command = f"resume {found.since}"

    existing.walk(new)

    assert_as_declared(existing, new)


def test_a_pool_that_the_old_revision_has_no_workers_of_leaves_it_where_it_is():
    existing, new = begun(new="damaged"), gated(65, **BACK)
    decode = new.spec.roles.decode
    assert decode is not None
    more = decode.pools[0].model_copy(update={"name": "other", "replicas": 1})
    roles = new.spec.roles.model_copy(
        update={"decode": decode.model_copy(update={"pools": (*decode.pools, more)})}
    )
    new = new.model_copy(update={"spec": new.spec.model_copy(update={"roles": roles})})

    existing.walk(new)

    assert existing.gate == ("Failed", 0)
    lacks = f"it cannot go back: revision {A} has no snapshot of decode pool other"
    assert lacks in message(existing)


def with_decode_pools(cluster: PDCluster, *names: str) -> PDCluster:
    decode = cluster.spec.roles.decode
    assert decode is not None
    pools = tuple(decode.pools[0].model_copy(update={"name": each}) for each in names)
    role = decode.model_copy(update={"pools": pools})
    roles = cluster.spec.roles.model_copy(update={"decode": role})
    return cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"roles": roles})})


@pytest.mark.parametrize(
    ("names", "new_name"),
    [(("cpu", "more"), "more"), (("more",), ""), (("more", "other"), "other")],
)
def test_a_pool_that_comes_after_a_rollback_tries_nothing_again(
    names: tuple[str, ...], new_name: str
):
    """One that takes the place of another keeps its workers."""
    existing, new = begun(new="damaged"), gated(65, **BACK)
    existing.walk(new)

    plans = existing.walk(with_decode_pools(new, *names))

    assert not any(each.id.revision == B for plan in plans for each in plan.workloads)
    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)
    lacks = f"until then there is no worker of decode pool {new_name}, which revision {A} has not"
    assert message(existing).endswith(lacks) == bool(new_name)
    assert ("there is no worker of" in message(existing)) == bool(new_name)

    other = with_decode_pools(gated(66, **BACK), *names)
    existing.walk(other)
    assert_as_declared(existing, other)


@pytest.mark.parametrize("fields", [PAUSE, {**BACK, "fault": "damaged"}])
@pytest.mark.parametrize("killed_at", range(1, 28))
def test_an_operator_that_is_killed_in_any_step_goes_on_from_the_status(
    fields: dict[str, Any], killed_at: int
):
    fields = dict(fields)
    fault = fields.pop("fault", "")
    existing = begun(fault)
    new = gated(65, **fields)
    for _ in range(killed_at):
        existing.round(new)
    existing.round(new, crash=True)
    existing.ended = {}  # its memory

    existing.walk(new)

    if fault:
        assert existing.sizes(A) == WHOLE
        assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)
    else:
        assert_as_declared(existing, new)


def latency(new: float | None, old: float | None, requests: int = 100) -> Attainment:
    found = RevisionLatency("time_to_first_token_seconds_p90", 1.0, new, old)
    return Attainment(requests, (found,))


SLOW = latency(2.5, 0.8)
TEXT = (
    f"time_to_first_token_seconds_p90 is 2.5 s of revision {B} over 100 requests, 0.8 s of the old "
    "one in the same time; autoscale.objective is 1 s"
)


@pytest.mark.parametrize(
    "found",
    [
        latency(0.9, 0.2),  # it holds the objective
        latency(1.0, None),
        latency(2.5, 2.4),  # no worse than the old one
    ],
)
def test_latencies_that_hold_pass(found: Attainment):
    existing, new = begun(), gated(65, **BACK, min_requests=100)
    existing.attainment = found

    existing.walk(new)

    assert_as_declared(existing, new)


def test_a_slow_revision_goes_back_with_the_figures_of_both():
    existing, new = begun(), gated(65, **BACK, min_requests=100)
    existing.attainment = SLOW

    plans = existing.walk(new)

    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.GATE_FAILED)
    assert TEXT in message(existing)
    (event,) = [each for plan in plans for each in plan.events if each.reason == words.ROLLED_BACK]
    assert TEXT in event.message


def test_a_slow_revision_pauses_when_its_time_is_over_and_not_before():
    existing, new = begun(), gated(65, **PAUSE, min_requests=100)
    existing.attainment = SLOW
    until(existing, new, ("Baking", 0))
    began = existing.seconds

    until(existing, new, ("Failed", 0))

    assert existing.seconds - began >= BAKE
    existing.walk(new)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.GATE_FAILED)
    assert TEXT in message(existing)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, f"revision {B} has answered fewer than 100 requests since "),
        (latency(2.5, 0.8, 99), f"revision {B} has answered fewer than 100 requests since "),
        (
            replace(latency(2.5, 0.8, 99), counted_since="2026-01-02T03:00:00Z"),
            "requests since 2026-01-02T03:00:00Z, when this operator began to count",
        ),
        (latency(None, 0.8), f"too few samples of time_to_first_token_seconds_p90 of revision {B}"),
        (latency(2.5, None), "the old one has too few requests in the same time to compare with"),
    ],
)
def test_latencies_that_are_not_known_wait_or_pass_as_the_user_says(
    found: Attainment | None, text: str
):
    existing, new = begun(), gated(65, **BACK, min_requests=100)
    existing.attainment = found

    plan = existing.walk(new)[-1]

    assert existing.gate == ("Baking", 0)
    assert existing.condition(words.ROLLOUT_PAUSED) == ("True", words.GATE_UNKNOWN)
    assert text in message(existing)
    assert plan.requeue_after_seconds <= new.spec.autoscale.interval_seconds
    existing.walk(gated(65, **BACK, min_requests=100, when_unknown="Continue"))
    assert_as_declared(existing, new)
