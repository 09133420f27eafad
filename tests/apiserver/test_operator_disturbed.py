"""Edits by hand, lost nodes and the operator's own death in the middle of a roll out: what serves
goes on, and it ends as declared.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_schema.labels import POOL, REVISION
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, Rule, ready
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.apiserver.registered import Registered
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for

OTHER_ENGINE, THIRD_ENGINE = {"maxBatchedTokens": 512}, {"maxBatchedTokens": 1024}
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

        wait_for(
            is_said,
            DEADLINE_SECONDS,
            lambda: f"{kind} does not say {said!r}; status: {self.scene.status}",
        )

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


def all_but(pool: str) -> Rule:
    """Pods of one pool do not get ready."""
    return lambda pod: None if pod["metadata"]["labels"].get(POOL) == pool else ready(pod)


@pytest.fixture
def etcd(tmp_path: Path, stage: Stage) -> Iterator[EtcdServer]:
    """In which all workers that are ready are registered."""
    server = EtcdServer(tmp_path)
    server.start()
    with Registered(stage.scene.api, stage.scene.namespace, server):
        yield server
    server.close()


def test_a_pool_in_the_place_of_another_comes_before_the_other_goes(stage: Stage, etcd: EtcdServer):
    stage.start()
    scene, revision = stage.scene, stage.begin(discovery={"etcd": {"endpoints": [etcd.endpoint]}})
    old, new, pods = scene.workload("decode"), scene.workload("decode", "new"), scene.pods()
    stage.nodes.rule = all_but("new")
    scene.change(roles={"decode": {"pools": [{"name": "new", "replicas": 2}]}})
    assert scene.revision == revision
    wait_for(lambda: f"{new}-1" in scene.pods(), DEADLINE_SECONDS, lambda: f"{scene.pods()}")
    stage.await_words("Ready", "pool cpu, which is no longer declared, stays until they are")
    assert scene.pods().items() > pods.items()
    assert scene.condition("Serving")["status"] == "True"
    stage.nodes.rule = ready
    wait_for(
        lambda: old not in scene.children("StatefulSet"),
        DEADLINE_SECONDS,
        lambda: f"{scene.status}",
    )
    scene.await_condition("Ready", "True")
    assert scene.condition("Serving")["status"] == "True"


def test_a_selector_that_is_edited_in_a_roll_out_is_reverted_and_what_serves_stays(stage: Stage):
    stage.start()
    old = stage.begin()
    pods = stage.pods_of(old)
    new = stage.roll(old)
    stage.select(new)
    wait_for(lambda: stage.served() == old, DEADLINE_SECONDS, lambda: f"{stage.scene.status}")
    stage.await_workloads(old, new)
    assert stage.pods_of(old) == pods
    stage.nodes.rule = ready
    stage.scene.await_condition("Ready", "True")
    assert stage.served() == new


def test_in_a_roll_out_what_serves_is_reverted_and_follows_its_scaler(stage: Stage):
    stage.start()
    scene, old = stage.scene, stage.begin()
    stage.roll(old)
    path = scene.path("StatefulSet", scene.workload("decode", revision=old))

    def size() -> int:
        found = scene.api.get(path)
        assert found is not None
        return int(found["spec"]["replicas"])

    scene.api.merge(path, {"spec": {"replicas": 0}})
    wait_for(lambda: size() == 2, DEADLINE_SECONDS, lambda: f"{size()}")
    scene.api.merge(
        scene.path("PDPoolScaler", f"{scene.name}-decode-cpu"), {"spec": {"replicas": 4}}
    )
    wait_for(lambda: size() == 4, DEADLINE_SECONDS, lambda: f"{size()}")
    wait_for(
        lambda: scene.replicas("decode") == 4,
        DEADLINE_SECONDS,
        lambda: f"{scene.replicas('decode')}",
    )


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


def test_a_third_revision_replaces_an_unfinished_one(stage: Stage):
    stage.start()
    old = stage.begin()
    pods = stage.pods_of(old)
    second = stage.roll(old)
    third = stage.roll(old, THIRD_ENGINE)
    assert len({old, second, third}) == 3
    assert (stage.served(), stage.pods_of(old)) == (old, pods)
    wait_for(
        lambda: not stage.pods_of(second), DEADLINE_SECONDS, lambda: f"{stage.pods_of(second)}"
    )
    stage.nodes.rule = ready
    stage.scene.await_condition("Ready", "True")
    stage.await_workloads(third)
    assert stage.served() == third


def test_recreate_goes_back_in_the_middle(stage: Stage):
    stage.start()
    scene, old = stage.scene, stage.begin(rollout={"strategy": "Recreate"})
    held = f"{scene.workload('decode')}-1"
    stage.hold(held)
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    wait_for(lambda: set(stage.pods_of(old)) == {held}, DEADLINE_SECONDS, lambda: f"{scene.pods()}")
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
    wait_for(
        lambda: (stage.scene.api.get(path) or {})["status"].get("readyReplicas") == 2,
        DEADLINE_SECONDS,
        "they are not ready",
    )
    stage.start()
    stage.scene.await_condition("Ready", "True")
    stage.await_workloads(new)
    assert (stage.served(), stage.pods_of(new)) == (new, pods)
    wait_for(lambda: not stage.pods_of(old), DEADLINE_SECONDS, lambda: f"{stage.pods_of(old)}")


def test_a_new_operator_ends_a_recreate_in_which_the_one_before_died(stage: Stage):
    before = stage.start()
    scene, old = stage.scene, stage.begin(rollout={"strategy": "Recreate"})
    held = f"{scene.workload('decode')}-0"
    stage.hold(held)
    scene.change(engine=OTHER_ENGINE)
    wait_for(
        lambda: stage.workloads() == {scene.workload("decode", revision=old)},
        DEADLINE_SECONDS,
        lambda: f"{stage.workloads()}",
    )
    before.kill()
    after = stage.start()
    after.await_resyncs(1)
    # which goes with its last pod
    assert stage.workloads() == {scene.workload("decode", revision=old)}
    stage.hold(held, [])
    scene.await_condition("Ready", "True")
    stage.await_workloads(scene.revision)
    assert stage.served() == scene.revision != old


def test_a_pod_of_a_lost_node_holds_its_workload_back_for_its_grace_period_only(stage: Stage):
    stage.start()
    scene = stage.scene
    stage.begin()
    name = scene.workload("decode")
    lost, before = stage.lose(f"{name}-1"), scene.pods()
    scene.api.delete(f"{lost}?gracePeriodSeconds=1")
    scene.api.delete(scene.path("StatefulSet", name))
    stage.await_words("DecodeReady", f"pod {name}-1 on node lost is still ending")
    wait_for(
        lambda: scene.pods().get(f"{name}-0") not in (None, before[f"{name}-0"]),
        DEADLINE_SECONDS,
        lambda: f"{scene.pods()}",
    )
    assert scene.pods()[f"{name}-1"] == before[f"{name}-1"]
    wait_for(lambda: scene.status["decode"] == "1/2", DEADLINE_SECONDS, lambda: f"{scene.status}")
    stage.await_words("DecodeReady", f"{name}-1")
    scene.api.delete(f"{lost}?gracePeriodSeconds=0")  # as an administrator does for a lost node
    scene.await_condition("Ready", "True")


def test_recreate_that_goes_back_waits_for_a_pod_of_a_lost_node_for_its_grace_period_only(
    stage: Stage,
):
    stage.start()
    scene, old = stage.scene, stage.begin(rollout={"strategy": "Recreate"})
    name = scene.workload("decode")
    lost, before = stage.lose(f"{name}-1"), scene.pods()
    scene.change(engine=OTHER_ENGINE)
    wait_for(
        lambda: set(stage.pods_of(old)) == {f"{name}-1"},
        DEADLINE_SECONDS,
        lambda: f"{scene.pods()}",
    )
    scene.api.delete(f"{lost}?gracePeriodSeconds=1")
    scene.change(engine=None)
    wait_for(
        lambda: f"{name}-0" in scene.pods(),
        DEADLINE_SECONDS,
        lambda: f"{scene.pods()}; {scene.status}",
    )
    assert scene.pods()[f"{name}-1"] == before[f"{name}-1"]


def test_what_an_authority_signs_is_not_written_while_the_authority_cannot_be(stage: Stage):
    operator = stage.start()
    scene = stage.scene
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{scene.name}-pdc-ca"},
        "stringData": {"a": "b"},
    }
    scene.api.create(scene.path("Secret"), foreign)
    scene.create()
    stage.await_words("Ready", f"Secret {scene.name}-pdc-ca")
    operator.await_resyncs(2)
    assert scene.children("Secret") == {}
    scene.api.delete(scene.path("Secret", f"{scene.name}-pdc-ca"))
    scene.await_condition("Ready", "True")
    assert set(scene.children("Secret")) == {f"{scene.name}-pdc-ca", f"{scene.name}-pdc-tls"}
