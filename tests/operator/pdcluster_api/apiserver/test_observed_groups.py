"""Workers of several pods as the planner sees them: each is one pod; and when one restarts."""

import copy
from datetime import datetime
from typing import Any

import pytest

from pdcluster_api.apiserver.groups import Restarting
from pdcluster_api.apiserver.observe import Live, group_restarts, observe, ready_workers
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import Manifest, render_record, render_workload
from pdcluster_api.plan.cluster import desired_state
from pdcluster_api.plan.cluster_status import plan_status
from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.observed.pools import ending_of, node_lost
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, WorkloadState
from pdcluster_schema.labels import PODS_PER_REPLICA
from pdcluster_schema.load import parse
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import GroupId, WorkloadId
from tests.operator import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
POOL = {"name": "wide", "replicas": 2, "podsPerReplica": 3}
CLUSTER = parse(
    made.cluster(
        spec={
            "model": {"name": "tiny", "path": "/models/tiny"},
            "engine": {"dataParallelSize": 3},
            "roles": {"mixed": {"pools": [POOL]}},
        }
    )
)
WIDE = WorkloadId(made.NAME, "mixed", "wide", revision_of(CLUSTER.spec))
RECORD = render_record(CLUSTER, WIDE, OWNER, "worker:1")


NOW = "2026-01-02T03:06:00Z"


def clock(minute: int, second: int = 0) -> str:
    return f"2026-01-02T03:{minute:02}:{second:02}Z"


class World:
    """The children of a PDCluster with two workers of three pods, all of which serve."""

    def __init__(self, replicas: int = 2) -> None:
        *sets, engine = render_workload(RECORD, replicas, OWNER)
        self.shared = [RECORD, engine]
        self.sets = {each["metadata"]["name"]: each for each in sets}
        self.pods: dict[str, Manifest] = {}
        for name, each in self.sets.items():
            each["status"] = {"updatedReplicas": each["spec"]["replicas"]}
            first = each["spec"].get("ordinals", {}).get("start", 0)
            for ordinal in range(first, first + each["spec"]["replicas"]):
                self.pods[f"{name}-{ordinal}"] = _pod(f"{name}-{ordinal}", name, each)
        self.write()

    def pod(self, rest: str) -> Manifest:
        return self.pods[f"{WIDE.name}-{rest}"]

    def stateful_set(self, rest: str) -> Manifest:
        return self.sets[f"{WIDE.name}-{rest}"]

    def live(self) -> Live:
        bodies = [*self.shared, *self.sets.values(), *self.pods.values()]
        return Live(made.cluster(), copy.deepcopy(bodies))

    def observed(self, **more: Any) -> Observed:
        return observe(self.live(), discovery=DiscoveryState(managed=True), faults={}, **more)

    def state(self, **more: Any) -> WorkloadState:
        (state,) = self.observed(**more).workloads
        return state

    def restarts(self, now: str = NOW) -> dict[int, Restarting]:
        found = group_restarts(self.live(), datetime.fromisoformat(now))
        return {worker.index: each for worker, each in found.items()}

    def stopped(self) -> set[int]:
        return {index for index, each in self.restarts().items() if each.is_stopped}

    def write(self, now: str = NOW) -> dict[int, Restarting]:
        """The sets as the operator applies them."""
        found = self.restarts(now)
        runs = {GroupId(WIDE, index): each.run for index, each in found.items()}
        *sets, _ = render_workload(RECORD, len(found), OWNER, runs)
        for each in sets:
            name = each["metadata"]["name"]
            self.sets[name] = {**each, "status": self.sets[name]["status"]}
        return found


def _pod(name: str, owner: str, stateful_set: Manifest) -> Manifest:
    template = stateful_set["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": made.NAMESPACE,
            "uid": f"{name.removeprefix(WIDE.name)}-first",
            "creationTimestamp": clock(1),
            "labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"],
            "ownerReferences": [{"kind": "StatefulSet", "name": owner, "uid": f"uid-{owner}"}],
        },
        "spec": {"nodeName": "node"},
        "status": {
            "startTime": clock(1),
            "conditions": [_ready("True", 3)],
            "containerStatuses": [
                {"name": "worker", "started": True, "state": {"running": {"startedAt": clock(2)}}}
            ],
        },
    }


def _ready(status: str, minute: int) -> dict[str, str]:
    return {"type": "Ready", "status": status, "lastTransitionTime": clock(minute)}


def unready(pod: Manifest, minute: int) -> None:
    pod["status"]["conditions"] = [_ready("False", minute)]


def restart(pod: Manifest, minute: int) -> None:
    """The container ended then, and runs again a second later."""
    (entry,) = pod["status"]["containerStatuses"]
    began = entry["state"]["running"]["startedAt"]
    entry["lastState"] = {
        "terminated": {"exitCode": 1, "startedAt": began, "finishedAt": clock(minute)}
    }
    entry["state"] = {"running": {"startedAt": clock(minute, 1)}}
    entry["restartCount"] = 1


def delete(pod: Manifest, minute: int) -> None:
    """It was deleted, as by an eviction, and has its grace period."""
    pod["metadata"]["deletionTimestamp"] = clock(minute + 5)


def replace(pod: Manifest, minute: int) -> None:
    """Another pod of its name, which begins."""
    pod["metadata"]["creationTimestamp"] = pod["status"]["startTime"] = clock(minute)
    pod["metadata"]["uid"] = "another"
    pod["status"]["containerStatuses"] = []
    unready(pod, minute)


def test_each_worker_is_one_pod_by_the_name_of_its_leader() -> None:
    state = World().state()
    assert state.id == WIDE
    assert (state.desired, state.current, state.ready, state.updated) == (2, 2, 2, 2)
    assert [pod.name for pod in state.pods] == [f"{WIDE.name}-0-0", f"{WIDE.name}-1-0"]
    assert [ordinal_of(pod) for pod in state.pods] == [0, 1]
    assert {pod.workload for pod in state.pods} == {WIDE}
    assert World().stopped() == set()


def test_a_worker_is_ready_with_all_of_its_pods() -> None:
    world = World()
    unready(world.pod("1-f-2"), 4)
    assert [pod.ready for pod in world.state().pods] == [True, False]
    assert world.state().ready == 1
    del world.pods[f"{WIDE.name}-1-f-2"]
    assert (world.state().current, world.state().ready) == (1, 1)


def test_leaders_alone_are_asked_for_their_metrics() -> None:
    names = [pod["metadata"]["name"] for _, pod in ready_workers(World().live(), WIDE.revision)]
    assert names == [f"{WIDE.name}-0-0", f"{WIDE.name}-1-0"]


def test_a_workload_of_no_worker_is_there_as_long_as_its_record() -> None:
    world = World(replicas=0)
    assert (world.state().desired, world.state().gone) == (0, False)
    world.shared = []
    assert world.observed().workloads == []


def test_pods_of_a_copied_label_are_of_no_worker() -> None:
    world = World()
    world.pod("0-f-1")["metadata"]["ownerReferences"][0]["name"] = "another"
    assert (world.state().current, world.state().ready) == (1, 1)


@pytest.mark.parametrize(
    ("which", "number"),
    [
        (["1-f-1"], f"1 of 3 pods of its worker have no node: {WIDE.name}-1-f-1"),
        (["1-0", "1-f-2"], f"2 of 3 pods of its worker have no node: {WIDE.name}-1-0, "),
    ],
)
def test_pods_of_a_worker_that_find_no_node_are_named(which: list[str], number: str) -> None:
    world = World()
    for name in which:
        world.pod(name)["spec"] = {}
        world.pod(name)["status"] = {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    "lastTransitionTime": clock(4),
                }
            ]
        }
    problem = world.state().pods[1].problem
    assert problem is not None
    assert problem.reason == "Unschedulable"
    cause = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    first = f"pod {WIDE.name}-{which[0]}: no node takes it since {clock(4)}: {cause}; "
    assert problem.message.startswith(first)
    assert number in problem.message


def test_a_lost_node_is_that_of_the_pod_that_cannot_end() -> None:
    world = World()
    world.pods = {f"{WIDE.name}-1-f-2": world.pod("1-f-2")}
    delete(world.pod("1-f-2"), 5)
    world.pod("1-f-2")["spec"]["nodeName"] = "lost"
    (pod,) = world.state().pods
    assert (pod.name, pod.terminating) == (f"{WIDE.name}-1-0", True)
    assert str(pod) == f"pod {WIDE.name}-1-f-2 on node lost"
    observed = world.observed()
    assert ending_of(observed, clock(5)).lost == frozenset()
    lost = ending_of(observed, clock(30)).lost
    assert lost == {f"{WIDE.name}-1-f-2"}
    problem = node_lost(each.ending for each in observed.workloads[0].pods)
    assert problem is not None
    assert f"kubectl delete pod {WIDE.name}-1-f-2 --force" in problem.message


@pytest.mark.parametrize("change", [restart, replace, delete])
@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
def test_a_worker_restarts_when_one_of_its_pods_ended_while_others_ran(
    which: str, change: Any
) -> None:
    world = World()
    change(world.pod(which), 5)
    assert world.stopped() == {1}
    problem = world.state().pods[1].problem
    assert problem is not None
    assert problem.reason == "GroupRestarting"
    why = {
        restart: "container worker ends with exit status 1",
        replace: "another one took its place, so it was deleted",
        delete: "it was deleted",
    }[change]
    cause = f"pod {WIDE.name}-{which}: {why}; all pods of its worker start again"
    assert problem.message == cause
    assert [pod.ready for pod in world.state().pods] == [True, False]


def test_the_pod_that_ended_first_is_named() -> None:
    world = World()
    restart(world.pod("1-f-1"), 6)
    restart(world.pod("1-0"), 5)
    world.pod("1-0")["status"]["containerStatuses"][0]["lastState"]["terminated"] |= {
        "reason": "OOMKilled",
        "exitCode": 137,
    }
    assert world.restarts()[1].last is not None
    assert f"pod {WIDE.name}-1-0: container worker used more memory than its limit" in str(
        world.restarts()[1].last
    )


@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
def test_the_status_says_why_a_worker_restarts_while_its_leader_ends(which: str) -> None:
    """A deletion without grace shows the leader as terminating first."""
    world = World()
    delete(world.pod(which), 5)
    status = plan_status(desired_state(CLUSTER, world.observed(), clock(6))).status
    found = {each["type"]: (each["reason"], each["message"]) for each in status["conditions"]}
    reason, message = found["MixedReady"]
    assert reason == "GroupRestarting"
    assert f"pod {WIDE.name}-{which}: it was deleted; all pods" in message


def test_an_evicted_pod_says_why() -> None:
    world = World()
    delete(world.pod("1-f-1"), 5)
    world.pod("1-f-1")["status"]["conditions"].append(
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
    )
    assert "it was deleted (EvictionByEvictionAPI: Eviction API: evicting)" in str(
        world.restarts()[1].last
    )
    world.pod("1-f-1")["status"]["conditions"][-1]["message"] = "x " * 9000
    assert len(str(world.restarts()[1].last)) < 700


def events(world: World, now: str = NOW) -> list[str]:
    found = world.restarts(now).items()
    return [
        each.last.event(GroupId(WIDE, index).leader).message
        for index, each in found
        if each.is_new and each.last is not None
    ]


@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
@pytest.mark.parametrize("change", [restart, replace, delete])
def test_every_look_at_a_restart_gives_its_event(which: str, change: Any) -> None:
    """So it is posted though the first try, or the status of the pass that began it, was lost."""
    world = World()
    change(world.pod(which), 5)
    (first,) = events(world)
    assert first.startswith(f"worker {WIDE.name}-1, restart 1: pod {WIDE.name}-{which}: ")
    world.write()
    for name in ("1-0", "1-f-1", "1-f-2"):
        delete(world.pod(name), 6)
        assert events(world) == [first]
    for name in ("1-0", "1-f-1", "1-f-2"):
        assert world.stopped() == {1}
        del world.pods[f"{WIDE.name}-{name}"]
        assert events(world) == [first]
    assert world.stopped() == set()
    world.write()
    assert [each["spec"]["replicas"] for each in world.sets.values()] == [1, 2, 1, 2]
    assert events(world) == []


@pytest.mark.parametrize("gone", [["1"], ["1-f"], ["1", "1-f"]])
@pytest.mark.parametrize("is_marked", [True, False])
def test_a_worker_that_is_scaled_away_does_not_restart(gone: list[str], is_marked: bool) -> None:
    world = World()
    delete(world.pod("1-0"), 5)
    for name in gone:
        if is_marked:
            world.stateful_set(name)["metadata"]["deletionTimestamp"] = clock(5)
        else:
            del world.sets[f"{WIDE.name}-{name}"]
    assert events(world) == []


def test_an_event_follows_from_one_set_that_was_written_before_the_other() -> None:
    world = World()
    restart(world.pod("1-f-2"), 5)
    (first,) = events(world)
    followers = world.stateful_set("1-f")
    world.write()
    world.sets[f"{WIDE.name}-1-f"] = followers
    assert (world.stopped(), events(world)) == ({1}, [first])


@pytest.mark.parametrize(
    ("change", "waits"), [(restart, [None, 10, 20, 40, 80, 160, 300, 300]), (delete, [None] * 4)]
)
def test_crashes_in_a_row_make_the_next_start_wait(change: Any, waits: list[int | None]) -> None:
    world = World()
    for wait in waits:
        world.pods = World().pods
        change(world.pod("1-0"), 5)
        world.write()
        world.pods = {}
        found = world.restarts()[1]
        assert (found.wait_seconds if found.is_stopped else None) == wait
        if wait:
            fault = world.state().fault
            assert fault is not None
            assert fault.reason == "CrashLooping"
            assert "container worker ends with exit status 1; " in fault.message
            assert "crashes in a row, all pods start again at 2026-01-02T03:" in fault.message
        else:
            assert world.state().fault is None
        world.write(clock(20))
        assert world.stateful_set("1")["spec"]["replicas"] == 1


def forget_pods(world: World) -> None:
    """It has not served yet."""
    for name in ("1", "1-f"):
        world.stateful_set(name)["metadata"]["annotations"].pop("pdcluster.io/group-pods", None)
    unready(world.pod("1-0"), 1)


def test_any_end_of_a_worker_that_has_not_served_counts_as_a_crash() -> None:
    world = World()
    for crashes in (1, 2):
        world.pods = World().pods
        forget_pods(world)
        delete(world.pod("1-f-1"), 5)
        last = world.write()[1].last
        assert last is not None
        assert last.crashes == crashes
        world.pods = {}
        assert world.restarts()[1].wait_seconds == 10 * (crashes - 1)
        world.write(clock(7))


def test_pods_of_one_start_may_be_made_long_after_one_another() -> None:
    world = World()
    forget_pods(world)
    world.pod("1-0")["metadata"]["creationTimestamp"] = clock(2)
    assert world.stopped() == set()


def test_a_clock_that_was_ahead_makes_no_start_wait_longer_than_the_back_off() -> None:
    world = World()
    for _ in range(2):
        world.pods = World().pods
        restart(world.pod("1-0"), 5)
        world.write()
        world.pods = {}
        waits = [world.restarts(now)[1].wait_seconds for now in (NOW, clock(5))]
        world.write(clock(7))
    assert waits == [10, 0]


def test_the_event_of_a_restart_that_cannot_be_written_stays_the_same() -> None:
    world = World()
    restart(world.pod("1-0"), 5)
    world.write()
    world.pods = {}
    world.write()
    world.pods = World().pods
    restart(world.pod("1-0"), 5)
    (text,) = events(world, clock(7))
    assert text.endswith("; 2 crashes in a row")
    assert events(world, clock(8)) == [text]


def test_a_follower_that_ended_before_its_leader_was_unready_is_noticed() -> None:
    world = World()
    restart(world.pod("1-f-1"), 5)
    unready(world.pod("1-0"), 5)
    assert world.stopped() == {1}


def test_a_crash_of_the_leader_before_it_was_ready_is_the_kubelets() -> None:
    world = World()
    (entry,) = world.pod("1-0")["status"]["containerStatuses"]
    entry["lastState"] = {"terminated": {"exitCode": 1, "finishedAt": clock(2, 57)}}
    assert world.stopped() == set()


@pytest.mark.parametrize(
    ("ready", "ended", "crashes"),
    [(7, 16, 2), (7, 17, 1), (40, 49, 2), (40, 50, 1)],
    ids=["soon", "after ten minutes", "soon after a long load", "ten minutes after one"],
)
@pytest.mark.parametrize("is_noted", [True, False])
def test_a_crash_follows_the_last_one_unless_the_worker_has_served_for_long(
    ready: int, ended: int, crashes: int, *, is_noted: bool
) -> None:
    world = World()
    restart(world.pod("1-f-1"), 5)
    world.write(clock(6))
    world.pods = {}
    world.write(clock(6))
    world.pods = World().pods
    world.pod("1-0")["status"]["conditions"] = [_ready("True", ready)]
    if is_noted:
        world.write(clock(ready))
    restart(world.pod("1-f-1"), ended)
    last = world.write(clock(ended))[1].last
    assert last is not None
    assert (last.number, last.crashes) == (2, crashes)


def test_a_leader_that_was_unready_for_a_while_has_served_all_the_same() -> None:
    world = World()
    restart(world.pod("1-f-1"), 5)
    world.write(clock(6))
    world.pods = {}
    world.write(clock(6))
    world.pods = World().pods
    for status, minute in (("True", 7), ("False", 15), ("True", 16)):
        world.pod("1-0")["status"]["conditions"] = [_ready(status, minute)]
        world.write(clock(minute))
    restart(world.pod("1-f-1"), 18)
    last = world.write(clock(18))[1].last
    assert last is not None
    assert last.crashes == 1


@pytest.mark.parametrize(("at", "is_noticed"), [(clock(4, 1), True), (clock(4), False)])
def test_a_follower_that_is_replaced_before_the_first_note_of_pods_is_noticed(
    at: str, *, is_noticed: bool
) -> None:
    """While no operator runs; within a minute of the leader's being ready, clocks may differ."""
    world = World()
    for name in ("1", "1-f"):
        del world.stateful_set(name)["metadata"]["annotations"]["pdcluster.io/group-pods"]
    world.pod("1-f-2")["metadata"] |= {"uid": "another", "creationTimestamp": at}
    assert world.stopped() == ({1} if is_noticed else set())
    if is_noticed:
        last = world.restarts()[1].last
        assert last is not None
        assert last.cause == f"pod {WIDE.name}-1-f-2: another one took its place, so it was deleted"
        assert last.crashes == 0


def test_what_another_wrote_into_the_annotation_counts_for_nothing() -> None:
    world = World()
    late = '{"number":1,"crashes":9,"at":"9999-12-31T23:59:59Z","cause":""}'
    texts = ("", "no", "[]", "[" * 5000, '{"number": 1}', '{"number": 1e400, "crashes": 1}', late)
    for text in (*texts, '{"number":1,"crashes":9,"at":"x","cause":""}'):
        world.stateful_set("1")["metadata"]["annotations"]["pdcluster.io/group-restart"] = text
        assert world.restarts()[1].last is None


@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
def test_a_pod_that_is_replaced_as_soon_as_its_worker_serves_is_noticed(which: str) -> None:
    world = World()
    replace(world.pod(which), 3)
    world.pod("1-0")["status"]["conditions"] = [_ready("True", 3)]
    assert world.stopped() == {1}


def test_pods_are_noted_when_their_worker_serves_and_forgotten_when_it_stops() -> None:
    world = World()
    for name in ("1", "1-f"):
        del world.stateful_set(name)["metadata"]["annotations"]["pdcluster.io/group-pods"]
    unready(world.pod("1-0"), 1)
    assert world.restarts()[1].run.notes == {}
    world.pod("1-0")["status"]["conditions"] = [_ready("True", 3)]
    pods = f"{clock(3)} -1-0-first -1-f-1-first -1-f-2-first"
    noted = {"pdcluster.io/group-pods": pods}
    assert world.restarts()[1].run.notes == noted
    world.write()
    unready(world.pod("1-0"), 4)
    assert world.restarts()[1].run.notes == noted
    delete(world.pod("1-f-1"), 5)
    world.write()
    notes = world.stateful_set("1-f")["metadata"]["annotations"]
    assert set(notes) == {PODS_PER_REPLICA, "pdcluster.io/group-restart"}


@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
def test_what_ends_before_its_worker_has_served_is_the_kubelets(which: str) -> None:
    world = World()
    unready(world.pod("1-0"), 1)
    restart(world.pod(which), 5)
    assert world.stopped() == set()
    assert not world.state().pods[1].ready
    world.pod("1-0")["status"]["conditions"] = [_ready("True", 6)]
    assert world.stopped() == set()


def test_clocks_of_nodes_that_differ_restart_nothing() -> None:
    world = World()
    world.pod("1-0")["metadata"]["creationTimestamp"] = clock(1, 2)
    (entry,) = world.pod("1-f-2")["status"]["containerStatuses"]
    entry["state"]["running"]["startedAt"] = clock(1)  # by a clock that is late
    assert world.stopped() == set()
    world.pod("1-f-1")["metadata"]["creationTimestamp"] = clock(3, 4)
    assert world.stopped() == set()


def test_pods_that_all_end_are_waited_for_by_their_sets() -> None:
    world = World()
    for name in ("1-0", "1-f-1", "1-f-2"):
        delete(world.pod(name), 5)
    assert world.stopped() == set()


def test_a_follower_that_ended_before_the_leader_was_ready_has_joined_since() -> None:
    world = World()
    restart(world.pod("1-f-1"), 2)
    assert world.stopped() == set()


def test_an_end_counts_while_the_leader_is_not_ready_any_more() -> None:
    world = World()
    unready(world.pod("1-0"), 4)
    restart(world.pod("1-f-1"), 5)
    assert world.stopped() == {1}


def test_a_stopped_worker_waits_for_its_last_pod() -> None:
    world = World()
    for name in ("1", "1-f"):
        world.stateful_set(name)["spec"]["replicas"] = 0
    assert world.stopped() == {1}
    for name in ("1-0", "1-f-1"):
        del world.pods[f"{WIDE.name}-{name}"]
    assert world.stopped() == {1}
    del world.pods[f"{WIDE.name}-1-f-2"]
    assert world.stopped() == set()


def test_a_new_set_waits_for_the_pods_of_an_earlier_one() -> None:
    world = World()
    del world.sets[f"{WIDE.name}-1"], world.sets[f"{WIDE.name}-1-f"]
    assert world.stopped() == {1}
    state = world.state()
    assert (state.desired, len(state.pods)) == (1, 2)


def test_the_number_of_pods_is_known_without_a_record() -> None:
    world = World()
    world.shared = []
    assert world.state().ready == 2
    for each in world.sets.values():
        each["metadata"]["annotations"][PODS_PER_REPLICA] = "many"
    assert world.state().ready == 2  # as their pods have it


def test_a_budget_counts_workers() -> None:
    world = World()
    world.shared.append(made.child("PodDisruptionBudget", WIDE.name, spec={"minAvailable": 5}))
    assert world.observed().budgets == {WIDE.name: 1}


def test_a_set_that_gets_no_pods_is_a_fault_of_the_workload() -> None:
    from pdcluster_api.plan.observed.state import Problem

    world, fault = World(), Problem("QuotaExceeded", "no room")
    live, name = world.live(), GroupId(WIDE, 1).followers
    observed = observe(live, discovery=DiscoveryState(managed=True), faults={name: fault})
    assert observed.workloads[0].fault == fault
