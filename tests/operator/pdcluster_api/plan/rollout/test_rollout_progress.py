"""The clock of a roll out, as sequences: seconds, what is there -> Ready's reason, the sizes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    PodState,
    WorkerRecords,
    WorkloadState,
    WriteFailure,
)
from pdcluster_api.plan.rollout import read_rollout
from pdcluster_api.plan.sizes import ScrapeState, pool_facts
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    Planned,
    condition_of,
    failing_pod,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)

CLUSTER, NEXT = make_cluster(), make_cluster(engine=65)
A, B = revision_of(CLUSTER.spec), revision_of(NEXT.spec)
DEADLINE = 3600
EXCEEDED = words.PROGRESS_DEADLINE_EXCEEDED
TAKEN = WriteFailure("ServiceAccount chat-pdc", words.NAME_TAKEN, "exists")


def with_deadline(cluster: PDCluster, seconds: int) -> PDCluster:
    rollout = cluster.spec.rollout.model_copy(update={"progress_deadline_seconds": seconds})
    return cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"rollout": rollout})})


def at(seconds: int) -> str:
    return f"2026-01-02T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"


def green(prefill: int = 0, decode: int = 0, *, desired: bool = True) -> list[WorkloadState]:
    """The new revision with so many ready workers; the others crash."""
    found = []
    for role, size, ready in (("prefill", 1, prefill), ("decode", 2, decode)):
        of = identity(B, role)
        pods = (
            tuple(failing_pod(of, ordinal, words.CRASH_LOOPING) for ordinal in range(ready, size))
            if desired
            else ()
        )
        found.append(workload(of, size if desired else 0, ready=ready, pods=pods))
    return found


class Story:
    """Passes over one object; each starts from the status alone, as after a restart."""

    def __init__(self, status: dict[str, object] | None = None) -> None:
        self.status = (
            dict(plan_all(CLUSTER, running(CLUSTER), at(0)).status) if status is None else status
        )
        self.plan: Planned | None = None

    def look(
        self,
        seconds: int,
        new: Sequence[WorkloadState] = (),
        cluster: PDCluster = NEXT,
        **fields: object,
    ) -> str:
        """One pass; returns Ready's reason."""
        seen = running(CLUSTER, status=self.status)
        seen = replace(seen, **{"workloads": [*seen.workloads, *new], **fields})
        self.plan = plan_all(cluster, seen, at(seconds))
        again = plan_all(cluster, replace(seen, status=self.plan.status), at(seconds))
        assert again.status == self.plan.status
        self.status = dict(self.plan.status)
        return str(condition_of(self.status, words.READY)["reason"])

    def outcome(
        self, seconds: int, *new: Sequence[WorkloadState], **fields: object
    ) -> tuple[str, dict[tuple[str, str], int]]:
        """One pass; returns Ready's reason and the sizes."""
        return self.look(seconds, *new, **fields), self.sizes

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        assert self.plan is not None
        return {(each.id.role, each.id.revision): each.replicas for each in self.plan.workloads}

    def said(self, kind: str = words.STALLED) -> str:
        return str(condition_of(self.status, kind).get("message"))


BOTH = {("prefill", A): 1, ("decode", A): 2, ("prefill", B): 1, ("decode", B): 2}
GIVEN_BACK = {("prefill", A): 1, ("decode", A): 2, ("prefill", B): 0, ("decode", B): 0}
ROLLED_BACK, HELD = (EXCEEDED, GIVEN_BACK), (EXCEEDED, BOTH)


def test_a_revision_that_makes_no_progress_is_scaled_to_0_and_the_old_one_keeps_serving() -> None:
    story = Story()
    assert story.look(10) == words.ROLLING_OUT
    assert story.plan is not None
    assert story.plan.requeue_after_seconds == DEADLINE
    assert story.look(20, green()) == words.CRASH_LOOPING
    assert story.outcome(DEADLINE + 9, green()) == (words.CRASH_LOOPING, BOTH)
    assert story.outcome(DEADLINE + 10, green()) == ROLLED_BACK
    assert (story.plan.serving, story.plan.requeue_after_seconds) == (A, None)
    assert condition_of(story.status, words.STALLED)["reason"] == EXCEEDED
    assert condition_of(story.status, words.SERVING)["status"] == "True"
    assert condition_of(story.status, words.DECODE_READY)["reason"] == EXCEEDED
    # What it was is remembered when no pod shows it any more, and nothing brings it back.
    said = story.said().replace("is being scaled", "is scaled")
    assert (story.look(9 * DEADLINE, green(desired=False)), story.sizes, story.said()) == (
        EXCEEDED,
        GIVEN_BACK,
        said,
    )
    assert "is scaled to 0" in said
    assert "is scaled to 0" in story.said(words.DECODE_READY)
    assert [each.reason for each in story.plan.events] == []


def old(prefill: int = 0, decode: int = 0) -> list[WorkloadState]:
    """The old revision with so many ready workers."""
    return [
        workload(identity(A, "prefill"), 1, ready=prefill),
        workload(identity(A), 2, ready=decode),
    ]


@pytest.mark.parametrize("prefill", [0, 1])
def test_while_the_old_revision_answers_nothing_the_new_one_keeps_its_workers(
    prefill: int,
) -> None:
    story, broken = Story(), old(prefill=prefill)
    assert story.look(0, workloads=broken) == words.ROLLING_OUT
    story.look(10, workloads=[*broken, *green(1, 1)])  # the third worker finds no room
    assert story.look(DEADLINE + 9, workloads=[*broken, *green(1, 1)]) == words.CRASH_LOOPING
    for seconds in (DEADLINE + 10, 2 * DEADLINE + 10):
        assert story.outcome(seconds, workloads=[*broken, *green(1, 1)]) == HELD
    # The old one answers again: nothing is decided again, and the new one heals by itself.
    assert story.outcome(3 * DEADLINE, workloads=[*old(1, 2), *green(1, 1)]) == HELD
    story.look(4 * DEADLINE, workloads=[*old(1, 2), *green(1, 2)])
    assert story.plan is not None
    assert (story.plan.serving, "rollout" in story.status) == (B, False)


def test_what_comes_forward_again_is_decided_upon_at_its_next_deadline() -> None:
    story = Story()
    story.look(0, workloads=old())
    assert story.outcome(DEADLINE, workloads=[*old(), *green(1)]) == (words.CRASH_LOOPING, BOTH)
    assert story.outcome(2 * DEADLINE, workloads=[*old(), *green(1)]) == HELD
    story.look(2 * DEADLINE + 10, workloads=[*old(), *green(1, 1)])
    ready = [*old(1, 2), *green(1, 1)]
    assert story.outcome(3 * DEADLINE + 9, workloads=ready) == (words.CRASH_LOOPING, BOTH)
    assert story.outcome(3 * DEADLINE + 10, workloads=ready) == ROLLED_BACK


def test_what_is_given_up_stays_so_when_the_old_one_answers_nothing_later() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    gone = green(desired=False)
    assert story.status["rollout"]["givenUp"] is True
    assert story.outcome(DEADLINE + 1, workloads=[*old(), *gone]) == ROLLED_BACK
    assert story.outcome(DEADLINE + 2, workloads=[*old(1, 2), *gone]) == ROLLED_BACK


def test_with_recreate_what_was_given_up_is_tried_again() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    # the old one has ended
    story.look(DEADLINE + 1, cluster=RECREATE, workloads=green(desired=False))
    assert story.sizes == {("prefill", B): 1, ("decode", B): 2}
    assert condition_of(story.status, words.STALLED) == {}
    assert story.status["rollout"] == {
        "revision": B,
        "progressDeadlineSeconds": DEADLINE,
        "ready": 0,
        "left": 0,
        "progressedAt": at(DEADLINE + 1),
    }


WRONG_ETCD = DiscoveryState(managed=False, error="etcd-0.wrong:2379 does not answer")
SILENT = WorkerRecords(error="it does not answer", again_seconds=5.0)


def waiting_for_etcd() -> list[WorkloadState]:
    """The new revision, whose pods run and wait: none is ready, none has a problem of its own."""
    found = []
    for role, size in (("prefill", 1), ("decode", 2)):
        of = identity(B, role)
        names = [f"{of.name}-{ordinal}" for ordinal in range(size)]
        pods = tuple(
            PodState(name, of, ready=False, terminating=False, node="n1") for name in names
        )
        found.append(workload(of, size, ready=0, pods=pods))
    return found


def test_a_revision_whose_etcd_does_not_answer_is_scaled_to_0_and_says_so() -> None:
    story, away = Story(), {"discovery": WRONG_ETCD, "worker_records": SILENT}
    story.look(0, **away)
    assert story.look(DEADLINE - 1, waiting_for_etcd(), **away) == words.ETCD_UNREACHABLE
    assert story.outcome(DEADLINE, waiting_for_etcd(), **away) == ROLLED_BACK
    assert condition_of(story.status, words.DISCOVERY_READY)["reason"] == words.ETCD_UNREACHABLE
    assert story.outcome(DEADLINE + 1, green(desired=False), **away) == ROLLED_BACK


def test_a_revision_to_which_the_service_was_led_by_hand_drains_first() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, waiting_for_etcd())
    assert story.sizes == GIVEN_BACK
    story.look(DEADLINE + 1, waiting_for_etcd(), service_revision=B, worker_records=SILENT)
    assert story.sizes == BOTH
    assert story.plan is not None
    assert story.plan.serving == A


def events(story: Story) -> list[tuple[str, bool]]:
    assert story.plan is not None
    return [(each.reason, each.warning) for each in story.plan.events]


REFUSED = WriteFailure("PDPoolScaler chat-decode-cpu", words.APPLY_FAILED, "no answer")


def test_the_deadline_is_an_event_once() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    assert events(story) == [(EXCEEDED, True)]
    assert story.plan is not None
    assert story.plan.events[0].message == story.said(words.READY)
    # a refusal that comes and goes hides it from Ready
    for seconds in range(DEADLINE + 1, DEADLINE + 7, 2):
        assert story.look(seconds, green(desired=False), failures=(REFUSED,)) == words.APPLY_FAILED
        assert events(story) == [(words.APPLY_FAILED, True)]
        assert story.look(seconds + 1, green(desired=False)) == EXCEEDED
        assert events(story) == []


def test_the_deadline_is_an_event_though_ready_speaks_of_a_refusal() -> None:
    story = Story()
    story.look(0, failures=(REFUSED,))
    assert story.look(DEADLINE, green(), failures=(REFUSED,)) == words.APPLY_FAILED
    assert events(story) == [(EXCEEDED, True)]
    assert story.plan is not None
    assert story.look(DEADLINE + 1, green()) == EXCEEDED
    assert events(story) == []


def test_a_worker_more_than_ever_before_starts_the_clock_again() -> None:
    story = Story()
    story.look(0)
    story.look(3000, green(decode=1))
    assert story.look(DEADLINE + 2999, green(decode=1)) == words.CRASH_LOOPING
    assert story.outcome(DEADLINE + 3000, green(decode=1)) == ROLLED_BACK


def test_a_worker_that_is_ready_again_and_again_does_not() -> None:
    story = Story()
    for seconds in range(0, DEADLINE, 400):
        assert story.look(seconds, green(decode=seconds // 400 % 2)) != EXCEEDED
    assert story.look(DEADLINE + 400, green(decode=1)) == EXCEEDED


def test_workers_that_are_ready_too_late_do_not_bring_it_back() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    assert story.outcome(DEADLINE + 1, green(1, 2)) == ROLLED_BACK
    assert story.plan is not None
    assert story.plan.serving == A


def test_all_that_wait_for_etcd_only_are_not_given_up() -> None:
    story, away = Story(), DiscoveryState(managed=False, error="it is away")
    story.look(0)
    story.look(10, green(1, 2), discovery=away)
    assert story.outcome(DEADLINE + 10, green(1, 2), discovery=away) == (
        words.ETCD_UNREACHABLE,
        BOTH,
    )
    story.look(DEADLINE + 20, green(1, 2))
    assert story.plan is not None
    assert (story.plan.serving, "rollout" in story.status) == (B, False)


def test_another_deadline_starts_over() -> None:
    story, longer = Story(), with_deadline(NEXT, 7200)
    story.look(0)
    story.look(DEADLINE, green())
    assert story.outcome(DEADLINE + 1, green(desired=False), longer) == (words.ROLLING_OUT, BOTH)
    assert story.look(DEADLINE + 7200, green(), longer) == words.CRASH_LOOPING
    assert story.look(DEADLINE + 7201, green(), longer) == EXCEEDED


def test_the_file_of_before_heals() -> None:
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    assert story.look(DEADLINE + 1, green(desired=False), CLUSTER) == words.AS_DECLARED
    assert "rollout" not in story.status
    assert story.sizes == {("prefill", A): 1, ("decode", A): 2}


def test_growth_in_the_meantime_is_of_what_serves_alone() -> None:
    grown = make_cluster(engine=65, decode=[pool(4)])
    story = Story()
    story.look(0)
    story.look(DEADLINE, green())
    assert revision_of(grown.spec) == B  # its size is no part of a revision
    story.look(DEADLINE + 1, green(desired=False), grown)
    assert story.sizes == {("prefill", A): 1, ("decode", A): 4, ("prefill", B): 0, ("decode", B): 0}


def decode_facts(status: dict[str, object]) -> PoolFacts:
    seen = running(CLUSTER, status=status)
    seen = replace(seen, workloads=[*seen.workloads, *green(desired=False)])
    return next(
        each
        for each in pool_facts(requested_sizes(NEXT, seen), seen, ScrapeState())
        if each.role == "decode"
    )


def test_the_budget_counts_its_accelerators_as_given_back() -> None:
    story = Story()
    story.look(0)
    assert decode_facts(story.status).held(2).workers == 4
    story.look(DEADLINE, green())
    assert (
        decode_facts(story.status).held(2).workers,
        decode_facts(story.status).held(5).workers,
    ) == (2, 5)


def first(ready: int = 0) -> list[WorkloadState]:
    return [workload(identity(A, "prefill"), 1), workload(identity(A), 2, ready=ready)]


def test_a_first_install_stalls_too_keeps_its_workers_and_heals() -> None:
    story = Story({})
    empty: dict[str, object] = {"workloads": [], "service_revision": None, "scalers": []}
    assert story.look(0, cluster=CLUSTER, **empty) == words.STARTING
    assert story.look(10, cluster=CLUSTER, workloads=first()) == words.STARTING
    assert story.look(DEADLINE + 10, cluster=CLUSTER, workloads=first()) == EXCEEDED
    assert story.sizes == {("prefill", A): 1, ("decode", A): 2}
    # it comes forward
    assert story.look(DEADLINE + 20, cluster=CLUSTER, workloads=first(1)) == words.STARTING
    assert story.look(DEADLINE + 30, cluster=CLUSTER, workloads=first(2)) == words.AS_DECLARED
    # no roll out any more
    assert story.look(9 * DEADLINE // 2, cluster=CLUSTER, workloads=first(1)) == words.STARTING
    assert "rollout" not in story.status


def test_what_ran_before_this_operator_has_no_clock() -> None:
    before = {key: value for key, value in Story().status.items() if key != "rollout"}
    story = Story(before)
    assert story.look(0, cluster=CLUSTER, workloads=first(1)) == words.STARTING
    assert story.look(9 * DEADLINE, cluster=CLUSTER, workloads=first(1)) == words.STARTING


RECREATE = make_cluster(engine=65, strategy="Recreate")


def test_recreate_comes_forward_as_the_old_end_and_has_nothing_to_go_back_to() -> None:
    story = Story()

    def ending(number: int) -> dict[str, object]:
        return {
            "workloads": [workload(identity(A), 0, ready=0, current=number, gone=True)],
            "cluster": RECREATE,
        }

    assert story.look(0, **ending(2)) == words.ROLLING_OUT
    assert story.look(3000, **ending(1)) == words.ROLLING_OUT
    assert story.look(DEADLINE + 2999, **ending(1)) == words.ROLLING_OUT
    assert story.look(DEADLINE + 3000, **ending(1)) == EXCEEDED
    assert story.look(DEADLINE + 3010, cluster=RECREATE, workloads=green()) == words.CRASH_LOOPING
    assert story.look(2 * DEADLINE + 3010, cluster=RECREATE, workloads=green()) == EXCEEDED
    assert story.sizes == {("prefill", B): 1, ("decode", B): 2}


def test_the_clock_stands_while_a_name_that_it_needs_is_taken() -> None:
    story = Story()
    assert story.look(0, failures=(TAKEN,)) == words.NAME_TAKEN
    assert story.look(9 * DEADLINE // 2, failures=(TAKEN,)) == words.NAME_TAKEN
    assert story.look(5 * DEADLINE) == words.ROLLING_OUT
    assert story.look(6 * DEADLINE - 1, green()) == words.CRASH_LOOPING
    assert story.look(6 * DEADLINE, green()) == EXCEEDED


@pytest.mark.parametrize(
    "name",
    [
        "PodDisruptionBudget chat-decode-cpu",
        "PDPoolScaler chat-decode-cpu",
        "Service chat-workers",
    ],
)
def test_the_clock_goes_on_while_a_name_is_taken_that_no_worker_needs(name: str) -> None:
    story, taken = Story(), (WriteFailure(name, words.NAME_TAKEN, "exists"),)
    story.look(0, failures=taken)
    assert story.outcome(DEADLINE, green(), failures=taken) == (words.NAME_TAKEN, GIVEN_BACK)


@pytest.mark.parametrize(
    "name",
    [
        "Secret chat-pdc-tls",
        "NetworkPolicy chat-pdc",
        "StatefulSet chat-decode-cpu-0a1b2c3d",
        "ControllerRevision chat-decode-cpu-0a1b2c3d",
        "ConfigMap chat-decode-cpu-0a1b2c3d",
        "ConfigMap chat-policy",
        "Service chat-etcd",
        "Service chat",
    ],
)
def test_the_clock_stands_while_one_that_workers_or_clients_need_is_taken(name: str) -> None:
    story, taken = Story(), (WriteFailure(name, words.NAME_TAKEN, "exists"),)
    story.look(0, failures=taken)
    assert story.outcome(9 * DEADLINE // 2, green(), failures=taken) == (words.NAME_TAKEN, BOTH)


@pytest.mark.parametrize(
    "spoilt",
    [
        None,
        "x",
        {},
        {"revision": "r", "progressDeadlineSeconds": 1, "ready": 0, "left": 0, "progressedAt": "x"},
    ],
)
def test_what_cannot_be_read_counts_as_never_written(spoilt: object) -> None:
    assert read_rollout({"rollout": spoilt}) is None
