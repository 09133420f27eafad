"""Starts the test cluster on this machine.

`up` returns when the node is ready, names resolve and the sample model is
there as PersistentVolumeClaim `models`.  `removal.down` ends every process and
leaves the machine as it was, but for the cache directory and the Debian packages.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import yaml

from e2e.rig import components, images, removal, store
from e2e.rig.paths import CACHE, IMAGES, REPOSITORY, Cluster
from e2e.rig.removal import down, is_running
from e2e.rig.shell import CommandError, environment, install_packages, run, step
from tests.apiserver.credentials import Credentials

PACKAGES = {
    **images.PACKAGES,
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
}
NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--propagation=unchanged")
READY_SECONDS = 180.0


def up(cluster: Cluster) -> None:
    """Build what is missing and start the cluster.  Raises CommandError."""
    if os.geteuid() != 0:
        raise CommandError(
            "the test cluster needs root, for namespaces and containers; or set "
            "PDCLUSTER_KUBECONFIG to use a cluster of yours"
        )
    if is_running(cluster):
        raise CommandError(
            f"the cluster of {cluster.root} is running: use it, or end it with `make cluster-down`"
        )
    down(cluster)
    install_packages(PACKAGES)
    images.build_images()
    store.fill()
    with step("starting Kubernetes"):
        cluster.pki.mkdir(parents=True)
        cluster.images.write_text(" ".join(IMAGES.loaded))
        store.copy_to(cluster.containerd)
        _start_first(cluster)
        _wait_for_node(cluster, cluster, components.FIRST)
        kubectl(
            cluster,
            "apply",
            "--server-side",
            "--filename",
            "-",
            stdin=yaml.safe_dump_all(_objects(cluster)),
        )
        kubectl(
            cluster, "wait", "pvc/models", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s"
        )


def add_node(cluster: Cluster) -> None:
    """Start a second node beside that of a running cluster, in namespaces below its own.  Raises
    CommandError.
    """
    holder, second = removal.holder_of(cluster), cluster.second
    if holder is None:
        raise CommandError(f"no cluster of {cluster.root} is running: start it by `make cluster`")
    removal.down(second)
    with step("starting a second node"):
        components.write_node(second, components.SECOND, cluster.pki)
        store.copy_to(second.containerd)
        (first,) = removal.children(holder)
        inside = ("nsenter", f"--target={first}", *NAMESPACES[:5])
        own = [each for each in NAMESPACES if each != "--net"]
        _start_box(second, [*inside, "unshare", *own])
        _wait_for_node(cluster, second, components.SECOND)


def kubectl(cluster: Cluster, *arguments: str, stdin: str | None = None) -> str:
    """Run kubectl as administrator of the cluster.  Raises CommandError."""
    return run(
        [CACHE.kubernetes / "kubectl", f"--kubeconfig={cluster.kubeconfig}", *arguments],
        stdin=stdin,
    )


def _start_first(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        shutil.copy(
            components.write_all(cluster, Credentials(cluster.pki), url), cluster.kubeconfig
        )
        cluster.kubeconfig.chmod(0o600)
        _start_box(cluster, ["unshare", *NAMESPACES], listener.fileno())


def _start_box(cluster: Cluster, namespaces: Sequence[str], *descriptors: int) -> None:
    cluster.log.mkdir()
    box = [sys.executable, "-m", "e2e.rig.box", "run", cluster.root, *descriptors]
    with (cluster.log / "box.log").open("wb") as log:
        holder = subprocess.Popen(
            [*namespaces, *map(str, box)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            start_new_session=True,
            cwd=REPOSITORY,
            env=environment(),
        )
    # it outlives this process: nothing will ever wait for it, and Popen need not complain
    holder.returncode = 0


def _wait_for_node(cluster: Cluster, box: Cluster, node: components.Node) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            kubectl(
                cluster,
                "wait",
                f"node/{node.name}",
                "--for=condition=Ready",
                "--timeout=5s",
                "--request-timeout=10s",
            )
            kubectl(cluster, "get", "serviceaccount/default", "--namespace=default")
            return
        except CommandError as e:
            if not is_running(box) or time.monotonic() > deadline:
                raise CommandError(f"the node did not start; its logs are in {box.log}\n{e}") from e
            time.sleep(0.5)


def _objects(cluster: Cluster) -> list[dict[str, object]]:
    """The sample model as a volume of the namespace `default`."""
    volume = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": "default", "name": "models"},
        "hostPath": {"path": str(cluster.models), "type": "Directory"},
    }
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}},
        "volumeName": "models",
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "models"},
            "spec": volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": "default"},
            "spec": claim,
        },
    ]
