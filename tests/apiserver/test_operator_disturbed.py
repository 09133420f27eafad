"""Edits by hand, lost nodes and the operator's own death in the middle of a roll out: what serves
goes on, and it ends as declared.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_schema.labels import REVISION
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

OTHER_ENGINE = {"maxBatchedTokens": 512}
HOLD = "example.com/hold"


class Stage:
    """A namespace with a PDCluster, nodes, and operators that can be started and killed."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path, nodes: Nodes) -> None:
        self.scene, self.nodes = Scene(PlainApi(plane.kubeconfig), namespace), nodes
        self._operators: list[OperatorProcess] = []
        self._plane, self._namespace, self._folder = plane, namespace, folder

    def start(self) -> OperatorProcess:
        """A new operator process."""
        name = f"operator-{len(self._operators)}"
        process = OperatorProcess(
            self._folder,
            self._plane.kubeconfig,
            name=name,
            PDCLUSTER_WATCH_NAMESPACES=self._namespace,
        )
        self._operators.append(process)
        process.start()
        return process

    def close(self) -> None:
        """Nothing of it goes on."""
        for process in self._operators:
            process.kill()
        self.scene.delete()

    def begin(self, **changes: Body) -> str:
        """A PDCluster that is ready; returns its revision."""
        self.scene.create(**changes)
        self.scene.await_condition("Ready", "True")
        return self.scene.revision

    def roll(self, old: str, engine: Body = OTHER_ENGINE) -> str:
        """Another revision, whose workers are made and do not get ready; returns it."""
        self.nodes.rule = lambda pod: (
            ready(pod) if pod["metadata"]["labels"].get(REVISION) in (None, old) else None
        )
        self.scene.change(engine=engine)
        new = self.scene.revision
        self.await_workloads(old, new)
        wait_for(
            lambda: len(self.pods_of(new)) == 3, DEADLINE_SECONDS, lambda: f"{self.scene.pods()}"
        )
        return new

    def await_workloads(self, *revisions: str) -> None:
        """Wait until there are workloads of these revisions, two each, and of no others."""
        wanted = {
            self.scene.workload(role, revision=revision)
            for revision in revisions
            for role in ("prefill", "decode")
        }
        wait_for(
            lambda: self.workloads() == wanted,
            DEADLINE_SECONDS,
            lambda: f"wanted {wanted}, found {self.workloads()}",
        )

    def workloads(self) -> set[str]:
        """Names of the workers' StatefulSets."""
        return {name for name in self.scene.children("StatefulSet") if not name.endswith("-etcd")}

    def pods_of(self, revision: str) -> dict[str, str]:
        """Uids of a revision's pods by name."""
        return {name: uid for name, uid in self.scene.pods().items() if revision in name}

    def served(self) -> str:
        """The revision that the Service selects."""
        service = self.scene.api.get(self.scene.path("Service", self.scene.name))
        return "" if service is None else service["spec"]["selector"][REVISION]

    def select(self, revision: str) -> None:
        """Edit the Service by hand."""
        self.scene.api.merge(
            self.scene.path("Service", self.scene.name),
            {"spec": {"selector": {REVISION: revision}}},
        )

    def await_words(self, kind: str, said: str) -> None:
        """Wait until the message of a condition that is not true has some words."""

        def is_said() -> bool:
            found = self.scene.condition(kind)
            return found.get("status") == "False" and said in found["message"]

        self.scene.until(is_said)

    def lose(self, name: str) -> str:
        """Bind a pod to a node that is not there, so that no kubelet ends it; returns its path."""
        path = f"/api/v1/namespaces/{self.scene.namespace}/pods/{name}"
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"kind": "Node", "name": "lost"},
        }
        self.scene.api.create(f"{path}/binding", binding)
        return path

    def hold(self, name: str, finalizers: list[str] | None = None) -> None:
        """Keep a pod from going; with an empty list, let it go."""
        path = f"/api/v1/namespaces/{self.scene.namespace}/pods/{name}"
        self.scene.api.merge(
            path, {"metadata": {"finalizers": [HOLD] if finalizers is None else finalizers}}
        )


@pytest.fixture
def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    with Nodes(PlainApi(control_plane.kubeconfig), namespace) as nodes:
        found = Stage(control_plane, namespace, tmp_path, nodes)
        yield found
        found.close()


def test_a_workload_that_cannot_be_made_again_is_left_alone_and_reported(stage: Stage):
    operator = stage.start()
    scene, old = stage.scene, stage.begin()
    new = stage.roll(old)
    operator.kill()
    pods = stage.pods_of(old)
    for kind in ("ControllerRevision", "ConfigMap"):
        scene.api.delete(scene.path(kind, scene.workload("decode", revision=old)))
    after = stage.start()
    stage.await_words(
        "Ready",
        f"StatefulSet {scene.workload('decode', revision=old)}: its record and its engine file are "
        "lost",
    )
    after.await_resyncs(2)
    stage.await_workloads(old, new)
    assert stage.pods_of(old) == pods
    assert scene.condition("Serving")["status"] == "True"
    stage.nodes.rule = ready
    scene.await_condition("Ready", "True")
    stage.await_workloads(new)


def test_recreate_goes_back_in_the_middle(stage: Stage):
    stage.start()
    scene, old = stage.scene, stage.begin(rollout={"strategy": "Recreate"})
    held = f"{scene.workload('decode')}-1"
    stage.hold(held)
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    scene.until(lambda: set(stage.pods_of(old)) == {held})
    stage.await_words("Ready", f"1 of its pods are left, first pod {held}")
    scene.change(engine=None)
    assert scene.revision == old
    # The others of its role cannot be made beside it.
    scene.await_condition("PrefillReady", "True")
    stage.await_words("DecodeReady", f"pod {held} is still ending")
    stage.hold(held, [])
    scene.await_condition("Ready", "True")
    stage.await_workloads(old)
    assert (stage.served(), stage.pods_of(new)) == (old, {})


def test_a_new_operator_ends_a_switch_in_which_the_one_before_died(stage: Stage):
    before = stage.start()
    old = stage.begin()
    new = stage.roll(old)
    before.kill()
    pods = stage.pods_of(new)
    # All that the switch had done: the new workers are ready and the Service selects them, and
    # nothing was written after it.
    stage.nodes.rule = ready
    stage.select(new)
    name = stage.scene.workload("decode")
    path = stage.scene.path("StatefulSet", name)
    stage.scene.until(lambda: (stage.scene.api.get(path) or {})["status"].get("readyReplicas") == 2)
    stage.start()
    stage.scene.await_condition("Ready", "True")
    stage.await_workloads(new)
    assert (stage.served(), stage.pods_of(new)) == (new, pods)
    stage.scene.until(lambda: not stage.pods_of(old))


def test_a_pod_of_a_lost_node_holds_its_workload_back_for_its_grace_period_only(stage: Stage):
    stage.start()
    scene = stage.scene
    stage.begin()
    name = scene.workload("decode")
    lost, before = stage.lose(f"{name}-1"), scene.pods()
    scene.api.delete(f"{lost}?gracePeriodSeconds=1")
    scene.api.delete(scene.path("StatefulSet", name))
    stage.await_words("DecodeReady", f"pod {name}-1 on node lost is still ending")
    scene.until(lambda: scene.pods().get(f"{name}-0") not in (None, before[f"{name}-0"]))
    assert scene.pods()[f"{name}-1"] == before[f"{name}-1"]
    scene.until(lambda: scene.status["decode"] == "1/2")
    stage.await_words("DecodeReady", f"{name}-1")
    scene.api.delete(f"{lost}?gracePeriodSeconds=0")  # as an administrator does for a lost node
    scene.await_condition("Ready", "True")
