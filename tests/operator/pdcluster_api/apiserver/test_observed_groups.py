"""Workers of several pods as the planner sees them: each is one pod; and when one restarts."""

import copy
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live, observe, ready_workers, stopped_groups
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import Manifest, render_record, render_workload
from pdcluster_api.plan.drain.draining import ordinal_of
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

    def stopped(self) -> set[int]:
        return {group.index for group in stopped_groups(self.live())}


def _pod(name: str, owner: str, stateful_set: Manifest) -> Manifest:
    template = stateful_set["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": made.NAMESPACE,
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


def test_the_problem_of_a_follower_is_the_workers() -> None:
    world = World()
    pod = world.pod("1-f-1")
    pod["status"] = {
        "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
        ]
    }
    problem = world.state().pods[1].problem
    assert problem is not None
    assert problem.reason == "Unschedulable"
    assert f"pod {WIDE.name}-1-f-1: no node takes it" in problem.message


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
    assert problem.message.startswith(f"pod {WIDE.name}-{which} ended while others")
    assert [pod.ready for pod in world.state().pods] == [True, False]


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
