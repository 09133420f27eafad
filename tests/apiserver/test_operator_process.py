"""The life of the operator process: restarts, upgrades, fail-over, an API server that goes away,
and an object that is refused.

On a control plane of its own, since its API server is stopped and its CRD relaxed;
the operator serves all namespaces here, as it is installed by default.
"""

import copy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.conftest import CRDS
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.limited_user import GROUPS, all_of, limited_user
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, SPEC, Scene
from tests.apiserver.plain_api import PlainApi
from tests.system.waiting import wait_for

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pdclusters.pdcluster.io"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/pdcluster-operator"
CORE = ("pods", "services", "secrets", "serviceaccounts", "events", "namespaces")
ELECTION = {"PDCLUSTER_LEADER_ELECTION": "true"}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(
        tmp_path_factory.mktemp("own-control-plane"), with_controllers=True, crds=CRDS
    ) as found:
        yield found


@pytest.fixture
def scene(plane: ControlPlane) -> Iterator[Scene]:
    """A PDCluster without an operator so far."""
    api = PlainApi(plane.kubeconfig)
    with Nodes(api, "default"):
        found = Scene(api, "default")
        found.create()
        yield found
        found.delete()
        wait_for(
            lambda: not found.everything() and not found.pods(),
            DEADLINE_SECONDS,
            lambda: f"{[*found.everything()]}",
        )


@pytest.fixture
def no_lease(plane: ControlPlane) -> None:
    """A killed leader's Lease would have to run out first."""
    PlainApi(plane.kubeconfig).delete(LEASE)


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    with OperatorProcess(tmp_path, plane.kubeconfig) as process:
        yield process


def test_a_restart_writes_nothing_and_another_default_image_rolls_nothing(
    plane: ControlPlane, scene: Scene, tmp_path: Path
):
    with OperatorProcess(tmp_path, plane.kubeconfig, name="before") as before:
        scene.await_condition("Ready", "True")
        before.await_resyncs(1)
        assert before.stop() == 0
    versions, pods = scene.versions(), scene.pods()
    with OperatorProcess(
        tmp_path, plane.kubeconfig, name="after", PDCLUSTER_WORKER_IMAGE="example/worker:2"
    ) as after:
        after.await_resyncs(2)
        assert after.num_writes() == 0
        assert (scene.versions(), scene.pods()) == (versions, pods)
        # A pool that is added to the revision later runs what its siblings run.
        scene.change(
            roles={
                "prefill": {
                    "pools": [*SPEC["roles"]["prefill"]["pools"], {"name": "more", "replicas": 1}]
                }
            }
        )
        scene.until(lambda: scene.workload("prefill", "more") in scene.children("StatefulSet"))
        scene.await_condition("Ready", "True")
        images = {
            _worker_image(body)
            for name, body in scene.children("StatefulSet").items()
            if "etcd" not in name
        }
        assert images == {"example/worker:1"}
        assert scene.pods().items() > pods.items()


def test_it_recovers_from_an_api_server_that_was_away(
    plane: ControlPlane, scene: Scene, operator: OperatorProcess
):
    scene.await_condition("Ready", "True")
    pods, pid = scene.pods(), operator.pid
    plane.stop()
    assert operator.get("/healthz") == (200, "ok\n")
    plane.start()
    path = scene.path("ConfigMap", "chat-policy")
    scene.api.delete(path)
    wait_for(
        lambda: scene.api.get(path),
        DEADLINE_SECONDS,
        lambda: f"not created again; log:\n{operator.log_end}",
    )
    scene.change(routing={"offload": {"prefillQueueMax": 21}})
    scene.await_condition("Ready", "True")
    assert (scene.pods(), operator.pid, operator.get("/healthz")[0]) == (pods, pid, 200)


def test_a_deletion_while_the_right_to_watch_was_taken_away_is_seen_once_it_is_given_back(
    plane: ControlPlane, scene: Scene, tmp_path: Path
):
    others = [all_of("", resources=CORE), all_of(*GROUPS, "pdcluster.io", "apiextensions.k8s.io")]
    rules = [*others, all_of("", resources=["configmaps"])]
    settings = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}
    with (
        limited_user(plane, "revoked", rules) as user,
        OperatorProcess(tmp_path, user.kubeconfig, **settings) as operator,
    ):
        scene.await_condition("Ready", "True")
        user.may(others)
        plane.stop()  # which ends the watches: one that is open would go on without the right
        plane.start()
        wait_for(
            lambda: 'cannot watch resource "configmaps"' in operator.log,
            DEADLINE_SECONDS,
            lambda: f"the watch is not refused; log:\n{operator.log_end}",
        )
        path = scene.path("ConfigMap", "chat-policy")
        scene.api.delete(path)
        user.may(rules)
        wait_for(
            lambda: scene.api.get(path),
            DEADLINE_SECONDS,
            lambda: f"not created again; log:\n{operator.log_end}",
        )
        assert operator.get("/healthz") == (200, "ok\n")


def test_a_pool_that_came_back_with_another_gpu_and_a_deleted_child_are_seen_after_a_restart(
    plane: ControlPlane, scene: Scene, tmp_path: Path
):
    """No watch could tell of either: there was no operator."""
    with OperatorProcess(tmp_path, plane.kubeconfig, name="before"):
        scene.await_condition("Ready", "True")
    name, pods = scene.workload("decode"), scene.pods()
    for pools in (
        [{"name": "other", "replicas": 1}],
        [{"name": "cpu", "gpu": "H100", "replicas": 1}],
    ):
        scene.change(roles={"decode": {"pools": pools}})
    assert scene.workload("decode") == name
    service = scene.path("Service", "chat")
    scene.api.delete(service)
    with OperatorProcess(tmp_path, plane.kubeconfig, name="after") as after:
        scene.await_condition("Ready", "True")
        body = scene.children("StatefulSet")[name]
        (container,) = body["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        assert "gpu: H100" in scene.children("ConfigMap")[name]["data"]["engine.yaml"]
        assert scene.children("ControllerRevision")[name]["data"]["pool"] == {
            "gpu": "H100",
            "accelerator": {},
            "gpusPerReplica": 1,
        }
        now = scene.pods()
        assert now[f"{name}-0"] != pods[f"{name}-0"]
        others = {pod: uid for pod, uid in pods.items() if name not in pod}
        assert now.items() >= others.items()
        assert scene.api.get(service)
        versions = scene.settled_versions()
        after.await_resyncs(2)
        assert scene.versions() == versions


@pytest.mark.usefixtures("no_lease")
def test_a_second_replica_takes_over_when_the_leader_stops(
    plane: ControlPlane, scene: Scene, tmp_path: Path
):
    with (
        OperatorProcess(tmp_path, plane.kubeconfig, name="first", **ELECTION) as first,
        OperatorProcess(tmp_path, plane.kubeconfig, name="second", **ELECTION) as second,
    ):
        scene.await_condition("Ready", "True")
        (leader,) = [each for each in (first, second) if _leads(each)]
        standby = second if leader is first else first
        assert (standby.num_writes(), standby.get("/readyz")[0]) == (0, 200)
        assert leader.stop() == 0
        wait_for(
            lambda: _leads(standby),
            DEADLINE_SECONDS,
            lambda: f"no operator leads; log:\n{standby.log_end}",
        )
        path = scene.path("ConfigMap", "chat-policy")
        scene.api.delete(path)
        scene.until(lambda: scene.api.get(path))


@pytest.mark.usefixtures("no_lease")
def test_a_leader_that_loses_the_lease_exits_with_1(plane: ControlPlane, tmp_path: Path):
    with OperatorProcess(tmp_path, plane.kubeconfig, **ELECTION) as leader:
        wait_for(lambda: _leads(leader), DEADLINE_SECONDS, "it does not lead")
        api = PlainApi(plane.kubeconfig)
        wait_for(lambda: _steal(api), DEADLINE_SECONDS, "the Lease cannot be changed")
        assert leader.wait() == 1
        assert "lost the lease" in leader.log


@pytest.mark.usefixtures("no_lease")
def test_a_standby_stops_at_once_with_0(plane: ControlPlane, tmp_path: Path):
    with (
        OperatorProcess(tmp_path, plane.kubeconfig, name="first", **ELECTION) as first,
        OperatorProcess(tmp_path, plane.kubeconfig, name="second", **ELECTION) as second,
    ):
        wait_for(lambda: _leads(first) != _leads(second), DEADLINE_SECONDS, "no operator leads")
        standby = second if _leads(first) else first
        assert standby.stop() == 0
        assert "Traceback" not in standby.log


def test_a_port_that_is_taken_ends_it_with_2_and_says_what_to_set(
    plane: ControlPlane, tmp_path: Path
):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        process = OperatorProcess(tmp_path, plane.kubeconfig, PDCLUSTER_HTTP_PORT=str(port))
        with pytest.raises(AssertionError, match="ended with 2"), process:
            pass
    assert f"error: port {port} cannot be listened on" in process.log
    assert "PDCLUSTER_HTTP_PORT" in process.log


def test_a_right_without_which_nothing_can_be_done_ends_it_with_1_and_names_it(
    plane: ControlPlane, tmp_path: Path
):
    process = OperatorProcess(tmp_path, plane.kubeconfig_for("no-rights"))
    with pytest.raises(AssertionError, match="ended with 1"), process:
        pass
    assert 'cannot list resource "pdclusters"' in process.log
    assert "Traceback" not in process.log


def test_metrics_tell_of_the_loop_and_of_the_api_calls_and_it_stops_without_a_word_of_trouble(
    scene: Scene, operator: OperatorProcess
):
    scene.await_condition("Ready", "True")
    scene.until(lambda: operator.metric("pdcluster_operator_pdclusters", ready="True") == 1)
    assert operator.metric("pdcluster_operator_is_leader") == 1
    assert operator.metric("pdcluster_operator_reconcile_seconds_count") > 0
    assert operator.metric(
        "pdcluster_operator_serving_replicas", pdcluster=scene.name, role="decode"
    ) == scene.replicas("decode")
    assert (
        operator.metric("pdcluster_operator_slo_seconds", pdcluster=scene.name, objective="ttft")
        == 0.5
    )
    assert operator.metric("pdcluster_operator_reconcile_errors_total") == 0
    assert (
        operator.metric(
            "pdcluster_operator_api_calls_total", verb="apply", kind="StatefulSet", code="201"
        )
        == 2
    )
    scene.until(lambda: operator.metric("pdcluster_operator_queue_depth") == 0)
    assert operator.stop() == 0
    assert "Traceback" not in operator.log
    assert "ERROR" not in operator.log


def test_an_object_that_is_refused_says_so_and_what_runs_goes_on(
    scene: Scene, operator: OperatorProcess
):
    scene.await_condition("Ready", "True")
    pods, kept = scene.pods(), set(scene.everything())
    crd = scene.api.get(CRD)
    assert crd is not None
    scene.api.merge(
        CRD, {"spec": {"versions": [_relaxed(version) for version in crd["spec"]["versions"]]}}
    )
    scene.until(lambda: _is_accepted(scene))
    found = scene.await_condition("Ready", "False", "InvalidSpec")
    assert "spec.roles.prefill.pools[0].gpu" in found["message"]
    assert "TPU" in found["message"]
    assert scene.condition("Serving")["status"] == scene.condition("Stalled")["status"] == "True"
    operator.await_resyncs(1)
    assert (scene.pods(), set(scene.everything())) == (pods, kept)
    scene.change(roles=SPEC["roles"])
    scene.await_condition("Ready", "True")
    assert scene.pods() == pods
    scene.api.merge(CRD, {"spec": {"versions": crd["spec"]["versions"]}})


def _is_accepted(scene: Scene) -> bool:
    try:
        scene.change(roles={"prefill": {"pools": [{"name": "cpu", "gpu": "TPU", "replicas": 1}]}})
    except AssertionError:
        return False
    return True


def _relaxed(version: dict[str, Any]) -> dict[str, Any]:
    """A version of the CRD that takes any spec, as an older one may have."""
    version = copy.deepcopy(version)
    schema = version["schema"]["openAPIV3Schema"]
    schema.pop("x-kubernetes-validations", None)
    schema["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return version


def _leads(process: OperatorProcess) -> bool:
    return process.metric("pdcluster_operator_is_leader") == 1


def _steal(api: PlainApi) -> bool:
    """Take the Lease in between two renewals."""
    try:
        return api.merge(LEASE, {"spec": {"holderIdentity": "thief"}}) is not None
    except AssertionError:
        return False


def _worker_image(stateful_set: dict[str, Any]) -> str:
    image: str = stateful_set["spec"]["template"]["spec"]["containers"][0]["image"]
    return image
