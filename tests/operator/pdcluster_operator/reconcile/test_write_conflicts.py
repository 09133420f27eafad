"""An object that others write as often as its drift is reverted: a failure that names them, only
after many times, and until it is over.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from pdcluster_api.apiserver.kinds import (
    CONFIG_MAP,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    Kind,
)
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.reconcile.write_conflicts import (
    MAX_WRITES,
    SETTLED_SECONDS,
    WINDOW_SECONDS,
    WriteConflicts,
)
from pdcluster_operator.writes.actions import Action, Verb
from tests.operator import bodies as made

RIVAL = {
    "manager": "kube-vip",
    "operation": "Update",
    "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}},
}
LIVE = [made.child("Service", "chat", metadata={"managedFields": [RIVAL]})]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def write_conflicts(clock: FakeClock) -> WriteConflicts:
    return WriteConflicts(clock=clock)


def action(
    kind: Kind = SERVICE,
    name: str = "chat",
    verb: Verb = Verb.APPLY,
    uid: str | None = None,
    **spec: Any,
) -> Action:
    return Action(verb, kind, "default", name, {"spec": spec}, uid=uid or f"uid-of-{name}")


def write(
    write_conflicts: WriteConflicts,
    *actions: Action,
    times: int = MAX_WRITES,
    refused: Iterable[WriteFailure] = (),
) -> None:
    for _ in range(times):
        left, failures = write_conflicts.sift(actions, LIVE)
        assert (left, failures) == (list(actions), [])
        write_conflicts.written(left, list(refused))


def one_pass(write_conflicts: WriteConflicts, *actions: Action) -> tuple[list[str], list[str]]:
    """Writes left of the actions of one reconcile, and the objects of the failures."""
    left, failures = write_conflicts.sift(actions, LIVE)
    write_conflicts.written(left, [])
    return [str(each) for each in left], [failure.object for failure in failures]


def test_after_many_times_it_is_a_failure_that_names_the_other_writer(
    write_conflicts: WriteConflicts,
):
    write(write_conflicts, action())
    left, (failure,) = write_conflicts.sift([action(), action(CONFIG_MAP, "chat-policy")], LIVE)
    assert [str(each) for each in left] == ["ConfigMap chat-policy"]
    assert (failure.object, failure.reason) == ("Service chat", "ApplyFailed")
    assert failure.message.startswith(
        "kube-vip writes what the operator has to revert (10 times within 300 s); let kube-vip "
        "leave"
    )


def test_a_writer_that_adds_fields_of_its_own_is_not_accused_of_the_fight_of_another(
    write_conflicts: WriteConflicts,
):
    """It is left to add them, so nothing of it is reverted."""
    mesh = {**RIVAL, "manager": "mesh"}
    editor = {**RIVAL, "manager": "editor", "fieldsV1": {"f:spec": {"f:type": {}}}}
    live = [made.child("Service", "chat", metadata={"managedFields": [mesh, editor]})]
    service = action(type="ClusterIP")
    write(write_conflicts, service)
    _, (failure,) = write_conflicts.sift([service], live)
    assert failure.message.startswith("editor writes what the operator has to revert")
    assert failure.message.endswith("let editor leave Service chat alone")


def test_an_unknown_writer_is_another_one(write_conflicts: WriteConflicts):
    write(write_conflicts, action())
    assert write_conflicts.sift([action()], [])[1][0].message.startswith("another writer writes")


def test_while_it_goes_on_it_is_reported_all_the_time_and_tried_once_in_a_window(
    write_conflicts: WriteConflicts, clock: FakeClock
):
    write(write_conflicts, action())
    tries = 0
    for second in range(1, int(3 * WINDOW_SECONDS)):
        clock.now = float(second)
        left, failed = one_pass(write_conflicts, action())
        assert failed == ["Service chat"]
        if left:
            tries += 1
            assert one_pass(write_conflicts) == (
                [],
                ["Service chat"],
            )  # which sees what was just written
    assert tries == 2


def test_it_is_over_when_nothing_has_had_to_be_reverted_for_some_time(
    write_conflicts: WriteConflicts, clock: FakeClock
):
    write(write_conflicts, action())
    assert one_pass(write_conflicts, action()) == ([], ["Service chat"])
    clock.now = WINDOW_SECONDS
    assert one_pass(write_conflicts, action()) == (["Service chat"], ["Service chat"])
    clock.now += SETTLED_SECONDS
    assert one_pass(write_conflicts) == ([], ["Service chat"])
    clock.now += 1.0
    assert one_pass(write_conflicts) == ([], [])
    clock.now += WINDOW_SECONDS
    assert one_pass(write_conflicts, action()) == (["Service chat"], [])
    assert (write_conflicts._conflicts, len(write_conflicts._written)) == ({}, 1)


def test_another_content_of_a_fought_object_is_tried_at_once(write_conflicts: WriteConflicts):
    write(write_conflicts, action())
    assert one_pass(write_conflicts, action()) == ([], ["Service chat"])
    assert one_pass(write_conflicts, action(selector="new")) == (["Service chat"], ["Service chat"])
    assert one_pass(write_conflicts, action()) == ([], ["Service chat"])
    assert one_pass(write_conflicts, action(selector="newer")) == (
        ["Service chat"],
        ["Service chat"],
    )
    assert one_pass(write_conflicts, action(selector="newer")) == ([], ["Service chat"])


def test_writing_something_else_each_time_or_to_another_object_is_no_contest(
    write_conflicts: WriteConflicts,
):
    write(write_conflicts, action(), times=MAX_WRITES - 1)
    for replicas in range(2 * MAX_WRITES):
        write(write_conflicts, action(STATEFUL_SET, replicas=replicas), times=1)
    for number in range(2 * MAX_WRITES):
        write(write_conflicts, action(name=f"chat-{number}"), times=1)
    assert write_conflicts.sift([action()], LIVE)[1] == []


def test_sizes_that_go_up_and_down_are_our_own_plan_and_no_contest(write_conflicts: WriteConflicts):
    for number in range(3 * MAX_WRITES):
        write(write_conflicts, action(STATEFUL_SET, replicas=2 + number % 2), times=1)
    write(write_conflicts, action(STATEFUL_SET, replicas=4))
    assert write_conflicts.sift([action(STATEFUL_SET, replicas=4)], [])[1] != []


@pytest.mark.parametrize("verb", [Verb.CREATE, Verb.REPLACE, Verb.PATCH])
def test_what_is_deleted_or_replaced_again_and_again_is_fought_over_too(
    write_conflicts: WriteConflicts, verb: Verb
):
    for number in range(MAX_WRITES):  # each time another object
        write(write_conflicts, action(verb=verb, uid=f"uid-{number}"), times=1)
    left, (failure,) = write_conflicts.sift([action(verb=verb, uid="uid-last")], [])
    assert (left, failure.object) == ([], "Service chat")
    does = "deletes" if verb is Verb.CREATE else "writes"
    assert failure.message.startswith(f"another writer {does} what the operator has to revert")


def test_what_is_deleted_or_refused_is_no_contest(write_conflicts: WriteConflicts):
    for verb in (Verb.DELETE, Verb.REFUSE):
        write(write_conflicts, action(verb=verb), times=MAX_WRITES + 1)
    write(
        write_conflicts,
        action(),
        times=MAX_WRITES + 1,
        refused=[WriteFailure("Service chat", "Forbidden", "no right")],
    )


def test_nothing_is_deleted_while_a_service_is_contested(write_conflicts: WriteConflicts):
    deletion = action(STATEFUL_SET, "old", Verb.DELETE)
    write(write_conflicts, action(CONFIG_MAP, "chat-policy"))
    assert write_conflicts.sift([action(CONFIG_MAP, "chat-policy"), deletion], LIVE)[0] == [
        deletion
    ]
    write_service = action()
    for _ in range(MAX_WRITES):
        write_conflicts.written([write_service], [])
    # beside a new one it keeps its pods from any eviction
    budget = action(POD_DISRUPTION_BUDGET, "old", Verb.DELETE)
    assert write_conflicts.sift([write_service, deletion, budget], LIVE)[0] == [budget]
