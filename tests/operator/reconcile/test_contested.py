"""An object that others write as often as it is put back: a failure that names them, and only after many times."""

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.cluster.converge import Action, Verb
from pdcluster_operator.cluster.kinds import CONFIG_MAP, SERVICE, STATEFUL_SET, Kind
from pdcluster_operator.plan.state import Failure
from pdcluster_operator.reconcile.contested import MAX_WRITES, WINDOW_SECONDS, Contested
from tests.operator.reconcile import bodies as made

RIVAL = {"manager": "kube-vip", "operation": "Update", "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}}}
LIVE = [made.child("Service", "chat", metadata={"managedFields": [RIVAL]})]


def action(kind: Kind = SERVICE, name: str = "chat", verb: Verb = Verb.TAKE_OVER, **spec: Any) -> Action:
    return Action(verb, kind, "default", name, {"spec": spec}, uid=f"uid-of-{name}")


def write(contested: Contested, *actions: Action, times: int = MAX_WRITES, refused: Iterable[Failure] = ()) -> None:
    for _ in range(times):
        left, failures = contested.sift(actions, LIVE)
        assert (left, failures) == (list(actions), [])
        contested.written(left, list(refused))


def test_after_many_times_it_is_a_failure_that_names_the_other_writer_until_the_time_is_over():
    now = 0.0
    contested = Contested(clock=lambda: now)
    write(contested, action())
    left, (failure,) = contested.sift([action(), action(CONFIG_MAP, "chat-policy")], LIVE)
    assert [str(each) for each in left] == ["ConfigMap chat-policy"]
    assert (failure.object, failure.reason) == ("Service chat", "ApplyFailed")
    assert failure.message.startswith("kube-vip writes what the operator has to put back (10 times within 300 s); let kube-vip leave")
    assert contested.sift([action()], [])[1][0].message.startswith("another writer writes")
    now = WINDOW_SECONDS + 1
    assert contested.sift([action()], LIVE) == ([action()], [])
    assert contested._written == {}


def test_writing_something_else_each_time_or_to_another_object_is_no_contest():
    contested = Contested(clock=lambda: 0.0)
    write(contested, action(), times=MAX_WRITES - 1)
    for replicas in range(2 * MAX_WRITES):
        write(contested, action(STATEFUL_SET, replicas=replicas), times=1)
    for number in range(2 * MAX_WRITES):
        write(contested, action(name=f"chat-{number}"), times=1)
    assert contested.sift([action()], LIVE)[1] == []


def test_what_is_made_deleted_or_refused_is_no_contest():
    contested = Contested(clock=lambda: 0.0)
    for verb in (Verb.CREATE, Verb.DELETE, Verb.REPLACE, Verb.REFUSE):
        write(contested, action(verb=verb), times=MAX_WRITES + 1)
    write(contested, action(), times=MAX_WRITES + 1, refused=[Failure("Service chat", "Forbidden", "no right")])


def test_nothing_is_deleted_while_a_service_is_contested():
    contested = Contested(clock=lambda: 0.0)
    deletion = action(STATEFUL_SET, "old", Verb.DELETE)
    write(contested, action(), action(CONFIG_MAP, "chat-policy"))
    assert contested.sift([action(CONFIG_MAP, "chat-policy"), deletion], LIVE)[0] == [deletion]
    assert contested.sift([action(), deletion], LIVE)[0] == []
