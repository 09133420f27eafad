"""The first process of the cluster's own namespaces: prepares them, starts the components and keeps
them running.

    python -m e2e.rig.box run CLUSTER-FOLDER LISTENER-FD      process 1 of new mount, network,
    process, IPC and UTS namespaces
    python -m e2e.rig.box run NODE-FOLDER      the same for a second node, in namespaces below those
    of the first; its network namespace it makes itself

Everything that a cluster leaves on a machine lives in these namespaces: mounts,
interfaces, routes, iptables chains and processes all end with process 1.
The one way in is a listening socket of the machine's loopback address, made
before the namespaces and handed down, which `relay` connects to the API server.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from e2e.rig.components import API_PORT, FIRST, SECOND
from e2e.rig.control_groups import make_control_groups, mount_control_groups
from e2e.rig.own_root import enter_own_network, enter_own_root, run
from e2e.rig.paths import CACHE, REPOSITORY, Cluster
from e2e.rig.removal import UPLINK

START_SECONDS = 60.0
RESTART_SECONDS = 1.0
CONTAINERD_ROOT = "/var/lib/containerd"
# Folder of the cluster -> where the programs look for it.
OWN_FOLDERS = {
    "kubelet": "/var/lib/kubelet",
    "etcd": "/var/lib/etcd",
    "cni": "/var/lib/cni",
    "log/pods": "/var/log/pods",
    "log/containers": "/var/log/containers",
}


def main(arguments: list[str]) -> None:
    """Never returns.

    By the first arguments, `run CLUSTER-FOLDER`, the cluster's processes are found (`removal`).
    """
    _, folder, *descriptors = arguments
    cluster = Cluster(Path(folder))
    os.chdir(REPOSITORY)  # nsenter begins at the root
    if descriptors:
        prepare(cluster)
        make_network()
        supervise(cluster, int(descriptors[0]), "127.0.0.1")
    first = os.open("/proc/1/ns/net", os.O_RDONLY)  # /proc is still the first node's
    enter_own_network()
    prepare(cluster)
    join_network(first)
    with socket.create_server(("127.0.0.1", API_PORT)) as listener:
        supervise(cluster, listener.fileno(), FIRST.address)


def prepare(cluster: Cluster) -> None:
    """Make this namespace a machine of its own: file system and control groups."""
    enter_own_root()
    run("mount", "-t", "proc", "proc", "/proc")  # of this process namespace
    for folder, place in [
        (cluster.containerd, CONTAINERD_ROOT),
        *((cluster.root / name, place) for name, place in OWN_FOLDERS.items()),
    ]:
        folder.mkdir(parents=True, exist_ok=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        if f" {place} " in Path("/proc/self/mountinfo").read_text():  # the first node's
            run("umount", "--lazy", place)
        run("mount", "--bind", folder, place)
    model = cluster.models / CACHE.model.name
    model.mkdir(parents=True)
    run("mount", "--bind", "-o", "ro", CACHE.model, model)
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("mount", "-t", "sysfs", "sysfs", "/sys")  # of this network namespace
    mount_control_groups()
    make_control_groups(cluster.control_group)


def make_network() -> None:
    """The network of the first node, and with it the cluster's."""
    # The node's address: a pair of interfaces, because not every kernel has a dummy one.
    run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
    run("ip", "address", "add", f"{FIRST.address}/24", "dev", "node0")
    for name in ("lo", "node0", "node1"):
        run("ip", "link", "set", name, "up")
    run("ip", "route", "add", "default", "dev", "node0")
    _forward()
    socket.sethostname(FIRST.name)


def join_network(first: int) -> None:
    """The network of the second node, and a cable to that of the first."""

    def there(*command: object) -> None:
        run("nsenter", f"--net=/proc/1/fd/{first}", "ip", *command)

    there("link", "add", UPLINK, "type", "veth", "peer", "name", "node0", "netns", "1")
    there("link", "set", UPLINK, "up")
    run("ip", "address", "add", f"{SECOND.address}/24", "dev", "node0")
    for name in ("lo", "node0"):
        run("ip", "link", "set", name, "up")
    run("ip", "route", "add", "default", "via", FIRST.address)
    there("route", "add", SECOND.address, "dev", UPLINK, "src", FIRST.address)
    there("route", "add", SECOND.pod_range, "via", SECOND.address, "dev", UPLINK)
    _forward()
    socket.sethostname(SECOND.name)


def _forward() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")


def supervise(cluster: Cluster, descriptor: int, api_server: str) -> NoReturn:
    """Start the relay and the components in order; start again what ends."""
    relay = [sys.executable, "-m", "e2e.rig.relay", str(descriptor), api_server, str(API_PORT)]
    running = {
        _start(
            cluster, {"name": "relay", "command": relay, "environment": {}}, descriptor
        ).pid: None
    }
    for component in json.loads((cluster.config / "components.json").read_text()):
        running[_start(cluster, component).pid] = component
        _wait_until_ready(component)
    while True:
        pid, status = os.wait()  # orphans of containers come here too
        component = running.pop(pid, None)
        if component is not None:
            print(
                f"box: {component['name']} ended with status {status}; starting it again",
                flush=True,
            )
            time.sleep(RESTART_SECONDS)
            running[_start(cluster, component).pid] = component


def _start(
    cluster: Cluster, component: dict[str, Any], *descriptors: int
) -> "subprocess.Popen[bytes]":
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        **component["environment"],
    }
    with (cluster.log / f"{component['name']}.log").open("ab") as log:
        return subprocess.Popen(
            component["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=descriptors,
        )


def _wait_until_ready(component: dict[str, Any]) -> None:
    """Return when the component answers, or after START_SECONDS: those that follow try again by
    themselves.
    """
    deadline = time.monotonic() + START_SECONDS
    while component["ready"] is not None and time.monotonic() < deadline:
        try:
            if isinstance(component["ready"], int):
                socket.create_connection(("127.0.0.1", component["ready"]), timeout=1.0).close()
            else:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(component["ready"])
            return
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
