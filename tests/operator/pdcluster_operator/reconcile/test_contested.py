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
from pdcluster_api.plan.observed.state import Failure
from pdcluster_operator.reconcile.contested import (
    MAX_WRITES,
    SETTLED_SECONDS,
    WINDOW_SECONDS,
    Contested,
)
from pdcluster_operator.writes.actions import Action, Verb
from tests.operator import bodies as made

RIVAL = {
    "manager": "kube-vip",
    "operation": "Update",
    "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}},
}
LIVE = [made.child("Service", "chat", metadata={"managedFields": [RIVAL]})]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def contested(clock: Clock) -> Contested:
    return Contested(clock=clock)


def action(
    kind: Kind = SERVICE,
    name: str = "chat",
    verb: Verb = Verb.APPLY,
    uid: str | None = None,
    **spec: Any,
) -> Action:
    return Action(verb, kind, "default", name, {"spec": spec}, uid=uid or f"uid-of-{name}")


def write(
    contested: Contested, *actions: Action, times: int = MAX_WRITES, refused: Iterable[Failure] = ()
) -> None:
    for _ in range(times):
        left, failures = contested.sift(actions, LIVE)
        assert (left, failures) == (list(actions), [])
        contested.written(left, list(refused))


def one_pass(contested: Contested, *actions: Action) -> tuple[list[str], list[str]]:
    """Writes left of the actions of one reconcile, and the objects of the failures."""
    left, failures = contested.sift(actions, LIVE)
    contested.written(left, [])
    return [str(each) for each in left], [failure.object for failure in failures]


def test_after_many_times_it_is_a_failure_that_names_the_other_writer(contested: Contested):
    write(contested, action())
    left, (failure,) = contested.sift([action(), action(CONFIG_MAP, "chat-policy")], LIVE)
    assert [str(each) for each in left] == ["ConfigMap chat-policy"]
    assert (failure.object, failure.reason) == ("Service chat", "ApplyFailed")
    assert failure.message.startswith(
        "kube-vip writes what the operator has to revert (10 times within 300 s); let kube-vip "
        "leave"
    )


def test_a_writer_that_adds_fields_of_its_own_is_not_accused_of_the_fight_of_another(
    contested: Contested,
):
    """It is left to add them, so nothing of it is reverted."""
    mesh = {**RIVAL, "manager": "mesh"}
    editor = {**RIVAL, "manager": "editor", "fieldsV1": {"f:spec": {"f:type": {}}}}
    live = [made.child("Service", "chat", metadata={"managedFields": [mesh, editor]})]
    service = action(type="ClusterIP")
    write(contested, service)
    _, (failure,) = contested.sift([service], live)
    assert failure.message.startswith("editor writes what the operator has to revert")
    assert failure.message.endswith("let editor leave Service chat alone")


def test_an_unknown_writer_is_another_one(contested: Contested):
    write(contested, action())
    assert contested.sift([action()], [])[1][0].message.startswith("another writer writes")


def test_while_it_goes_on_it_is_said_all_the_time_and_tried_once_in_a_window(
    contested: Contested, clock: Clock
):
    write(contested, action())
    tries = 0
    for second in range(1, int(3 * WINDOW_SECONDS)):
        clock.now = float(second)
        left, failed = one_pass(contested, action())
        assert failed == ["Service chat"]
        if left:
            tries += 1
            assert one_pass(contested) == ([], ["Service chat"])  # which sees what was just written
    assert tries == 2


def test_it_is_over_when_nothing_has_had_to_be_reverted_for_some_time(
    contested: Contested, clock: Clock
):
    write(contested, action())
    assert one_pass(contested, action()) == ([], ["Service chat"])
    clock.now = WINDOW_SECONDS
    assert one_pass(contested, action()) == (["Service chat"], ["Service chat"])
    clock.now += SETTLED_SECONDS
    assert one_pass(contested) == ([], ["Service chat"])
    clock.now += 1.0
    assert one_pass(contested) == ([], [])
    clock.now += WINDOW_SECONDS
    assert one_pass(contested, action()) == (["Service chat"], [])
    assert (contested._fights, len(contested._written)) == ({}, 1)


def test_another_content_of_a_fought_object_is_tried_at_once(contested: Contested):
    write(contested, action())
    assert one_pass(contested, action()) == ([], ["Service chat"])
    assert one_pass(contested, action(selector="new")) == (["Service chat"], ["Service chat"])
    assert one_pass(contested, action()) == ([], ["Service chat"])
    assert one_pass(contested, action(selector="newer")) == (["Service chat"], ["Service chat"])
    assert one_pass(contested, action(selector="newer")) == ([], ["Service chat"])


def test_writing_something_else_each_time_or_to_another_object_is_no_contest(contested: Contested):
    write(contested, action(), times=MAX_WRITES - 1)
    for replicas in range(2 * MAX_WRITES):
        write(contested, action(STATEFUL_SET, replicas=replicas), times=1)
    for number in range(2 * MAX_WRITES):
        write(contested, action(name=f"chat-{number}"), times=1)
    assert contested.sift([action()], LIVE)[1] == []


def test_sizes_that_go_up_and_down_are_our_own_plan_and_no_contest(contested: Contested):
    for number in range(3 * MAX_WRITES):
        write(contested, action(STATEFUL_SET, replicas=2 + number % 2), times=1)
    write(contested, action(STATEFUL_SET, replicas=4))
    assert contested.sift([action(STATEFUL_SET, replicas=4)], [])[1] != []


@pytest.mark.parametrize("verb", [Verb.CREATE, Verb.REPLACE, Verb.PATCH])
def test_what_is_deleted_or_replaced_again_and_again_is_fought_over_too(
    contested: Contested, verb: Verb
):
    for number in range(MAX_WRITES):  # each time another object
        write(contested, action(verb=verb, uid=f"uid-{number}"), times=1)
    left, (failure,) = contested.sift([action(verb=verb, uid="uid-last")], [])
    assert (left, failure.object) == ([], "Service chat")
    does = "deletes" if verb is Verb.CREATE else "writes"
    assert failure.message.startswith(f"another writer {does} what the operator has to revert")


def test_what_is_deleted_or_refused_is_no_contest(contested: Contested):
    for verb in (Verb.DELETE, Verb.REFUSE):
        write(contested, action(verb=verb), times=MAX_WRITES + 1)
    write(
        contested,
        action(),
        times=MAX_WRITES + 1,
        refused=[Failure("Service chat", "Forbidden", "no right")],
    )


def test_nothing_is_deleted_while_a_service_is_contested(contested: Contested):
    deletion = action(STATEFUL_SET, "old", Verb.DELETE)
    write(contested, action(CONFIG_MAP, "chat-policy"))
    assert contested.sift([action(CONFIG_MAP, "chat-policy"), deletion], LIVE)[0] == [deletion]
    write_service = action()
    for _ in range(MAX_WRITES):
        contested.written([write_service], [])
    # beside a new one it keeps its pods from any eviction
    budget = action(POD_DISRUPTION_BUDGET, "old", Verb.DELETE)
    assert contested.sift([write_service, deletion, budget], LIVE)[0] == [budget]
