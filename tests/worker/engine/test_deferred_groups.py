"""Requests of deferred groups wait behind the others of their priority, and give up their slots
where they are to be evicted; none loses a token.
"""

import pytest

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import SCHEDULER_NAMES, SchedulerSettings
from tests.worker.engine.conftest import make_spec


def of_group(request_id: str, group: str, **options) -> m.Submit:
    options = {"prompt": [ord(request_id), 2, 3], "max_tokens": 6} | options
    deadline = options.pop("deadline", None)
    spec = make_spec(request_id, **options)
    return m.Submit(
        type(spec)(
            spec.request_id,
            spec.prompt,
            spec.sampling,
            priority=spec.priority,
            deadline_seconds=deadline,
            group=group,
        )
    )


def begun(rig) -> str:
    """Ids in the order of their first steps."""
    ran = [request_id for batch in rig.runner.executed for request_id, _ in batch]
    return "".join(dict.fromkeys(ran))


def turns(rig) -> str:
    """Ids of a single slot, once for each time that it went to another."""
    ran = [request_id for batch in rig.runner.executed for request_id, _ in batch]
    return "".join(one for one, last in zip(ran, ["", *ran], strict=False) if one != last)


def check(rig, ids: str) -> None:
    for request_id in ids:
        assert rig.token_ids(request_id) == rig.runner.reference([ord(request_id), 2, 3], 6)


def test_waiting_requests_of_a_deferred_group_go_last_and_first_again_afterwards(engine):
    rig = engine(max_sequences=1)
    rig.handle(of_group("r", "run"))
    rig.handle(
        of_group("a", "late", deadline=1.0),
        of_group("b", "late", deadline=2.0),
        of_group("c", "next", deadline=9.0),
        m.DeferGroups(["late"]),
    )
    while "c" not in begun(rig):
        rig.step()
    rig.handle(of_group("d", "next", deadline=99.0), m.DeferGroups([]))
    rig.run()

    assert begun(rig) == "rcabd"
    check(rig, "rabcd")


def test_a_deferred_group_stays_ahead_of_lower_priorities(engine):
    rig = engine(max_sequences=1)
    rig.handle(of_group("r", "run"))
    rig.handle(
        of_group("l", "", priority=1),
        of_group("a", "late"),
        of_group("h", "late", priority=-1),
        of_group("n", ""),
        m.DeferGroups(["late"]),
    )
    rig.run()

    assert begun(rig) == "rhnal"


@pytest.mark.parametrize("policy", ["priority", "preemptive"])
@pytest.mark.parametrize("name", SCHEDULER_NAMES)
def test_a_running_request_is_evicted_for_another_that_waits_and_goes_on_later(
    engine, name, policy
):
    rig = engine(
        max_sequences=1,
        max_batched_tokens=100,
        scheduler=SchedulerSettings(name=name, policy=policy),
    )
    rig.handle(of_group("a", "late"))
    rig.step()
    rig.handle(m.DeferGroups(["late"], evicts=True), of_group("b", "next"))
    rig.run()

    assert turns(rig) == "aba"
    assert rig.core._scheduler.num_preemptions == 1
    check(rig, "ab")


@pytest.mark.parametrize(
    ("policy", "message", "waiting"),
    [
        ("priority", m.DeferGroups(["late"]), {}),  # those that run go on
        ("priority", m.DeferGroups(["late", "next"], evicts=True), {}),  # both are deferred
        ("priority", m.DeferGroups(["other"], evicts=True), {}),
        ("priority", m.DeferGroups(["late"], evicts=True), {"priority": 1}),
        ("fcfs", m.DeferGroups(["late"], evicts=True), {}),
    ],
)
def test_nothing_is_evicted_for_requests_that_may_not_go_first(engine, policy, message, waiting):
    rig = engine(max_sequences=1, scheduler=SchedulerSettings(policy=policy))
    rig.handle(of_group("a", "late"))
    rig.step()
    rig.handle(message, of_group("b", "next", **waiting))
    rig.run()

    assert turns(rig) == "ab"


def test_evictions_that_would_not_make_enough_room_are_left_out(engine):
    rig = engine(num_blocks=6)
    rig.handle(
        of_group("k", "kept", prompt=range(10), max_tokens=2),
        of_group("a", "late", max_tokens=4),
    )
    rig.step()
    rig.handle(m.DeferGroups(["late"], evicts=True), of_group("b", "next", prompt=range(40, 54)))
    rig.run()

    assert rig.core._scheduler.num_preemptions == 0


def test_an_aborted_request_of_a_deferred_group_leaves_nothing(engine):
    rig = engine(max_sequences=1)
    rig.handle(of_group("a", "late"), of_group("b", "late"))
    rig.handle(m.DeferGroups(["late"], evicts=True), of_group("c", "next"))
    rig.handle(m.Abort("a"), m.Abort("b"))  # one was evicted, one never ran
    rig.run()

    check(rig, "c")
    assert set(rig.blocks) <= {"free", "cached"}
    assert rig.core._scheduler.num_requests == 0
