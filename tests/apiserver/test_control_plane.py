import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apiserver.control_plane import ControlPlane, KubectlError, binary
from tests.system.waiting import wait_for

ROOT = Path(__file__).parents[2]

PARENT = """
import sys, time
from pathlib import Path
from tests.apiserver.control_plane import ControlPlane
with ControlPlane(Path(sys.argv[1])) as plane:
    print(plane.pid("etcd"), plane.pid("kube-apiserver"), flush=True)
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Return whether the process still runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_missing_binary_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCLUSTER_KUBERNETES", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `make kubernetes`"):
        binary("kube-apiserver")


def test_control_plane_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2
        assert all(map(is_alive, children))
        os.kill(parent.pid, signal.SIGKILL)
    wait_for(
        lambda: not any(map(is_alive, children)),
        10.0,
        lambda: f"of {children} some are still there",
    )


def test_objects_outlive_a_crash_of_the_api_server(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as plane:
        plane.kubectl("create", "configmap", "kept", "--from-literal=key=value")
        plane.stop()
        with pytest.raises(KubectlError, match="refused"):
            plane.kubectl("get", "configmap", "kept")
        plane.start()
        assert plane.kubectl("get", "configmap", "kept", "--output=jsonpath={.data.key}") == "value"
    assert not plane._processes


def test_kubectl_error_is_what_kubectl_said(control_plane: ControlPlane) -> None:
    with pytest.raises(KubectlError, match='namespaces "nowhere" not found'):
        control_plane.kubectl("get", "namespace", "nowhere")


def test_another_user_has_no_rights_unless_given(
    control_plane: ControlPlane, namespace: str
) -> None:
    here = ("--namespace", namespace)
    read = (
        "get",
        "configmaps",
        *here,
        "--kubeconfig",
        str(control_plane.kubeconfig_for("stranger")),
    )
    with pytest.raises(KubectlError, match="forbidden"):
        control_plane.kubectl(*read)
    control_plane.kubectl("create", "role", "reader", "--verb=list", "--resource=configmaps", *here)
    control_plane.kubectl(
        "create", "rolebinding", "reader", "--role=reader", "--user=stranger", *here
    )

    def may_read() -> bool:
        try:
            control_plane.kubectl(*read)
        except KubectlError:
            return False
        return True

    wait_for(may_read, 10.0, "the stranger may read")


def test_children_of_a_deleted_cluster_go_with_it(
    control_plane: ControlPlane, namespace: str
) -> None:
    here = ("--namespace", namespace)
    control_plane.kubectl("apply", *here, "--filename", str(ROOT / "examples" / "chat.yaml"))
    name, uid = control_plane.kubectl(
        "get", "pdc", *here, "--output=jsonpath={.items[0].metadata.name} {.items[0].metadata.uid}"
    ).split()
    owner = (
        f"[{{apiVersion: pdcluster.io/v1alpha1, kind: PDCluster, name: {name}, uid: {uid}, "
        f"controller: true}}]"
    )
    child = (
        f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: child, ownerReferences: {owner}}}}}"
    )
    control_plane.kubectl("apply", *here, "--filename=-", input=child)
    control_plane.kubectl("delete", "pdc", name, *here)

    def is_collected() -> bool:
        return not control_plane.kubectl("get", "configmap", "child", *here, "--ignore-not-found")

    wait_for(is_collected, 30.0, "the child is collected")
