"""The first process of the cluster's own namespaces: prepares them, starts the components and keeps them running.

    python -m e2e.rig.box run CLUSTER-FOLDER LISTENER-FD      process 1 of new mount, network, process, IPC and UTS namespaces
    python -m e2e.rig.box sweep CLUSTER-FOLDER                in a new mount namespace: remove the cluster's control groups

Everything that a cluster leaves on a machine lives in these namespaces: mounts,
interfaces, routes, iptables chains and processes all end with process 1.
The one way in is a listening socket of the machine's loopback address, made
before the namespaces and handed down, which `relay` connects to the API server.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.rig.components import API_PORT, NODE, NODE_ADDRESS
from e2e.rig.paths import CACHE, Cluster

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MNT_DETACH = 0x20000, 2
START_SECONDS = 60.0
RESTART_SECONDS = 1.0
CONTROL_GROUPS = Path("/sys/fs/cgroup")
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
    """Do what the arguments say; `run` never returns."""
    cluster = Cluster(Path(arguments[1]))
    if arguments[0] == "sweep":
        mount_control_groups()
        remove_control_groups(cluster.control_group)
    else:
        prepare(cluster)
        supervise(cluster, int(arguments[2]))


def prepare(cluster: Cluster) -> None:
    """Make this namespace a machine of its own: file system, control groups, network."""
    _own_root()
    for folder, place in [(cluster.containerd, CONTAINERD_ROOT), *((cluster.root / name, place) for name, place in OWN_FOLDERS.items())]:
        folder.mkdir(parents=True, exist_ok=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", folder, place)
    model = cluster.models / CACHE.model.name
    model.mkdir(parents=True)
    _run("mount", "--bind", "-o", "ro", CACHE.model, model)
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _run("mount", "-t", "sysfs", "sysfs", "/sys")  # of this network namespace
    mount_control_groups()
    for controller in _hierarchies():
        (controller / cluster.control_group).mkdir(exist_ok=True)
    _run("ip", "link", "set", "lo", "up")
    # The node's address: a pair of interfaces, because not every kernel has a dummy one.
    _run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
    _run("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
    for name in ("node0", "node1"):
        _run("ip", "link", "set", name, "up")
    _run("ip", "route", "add", "default", "dev", "node0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        bridged.write_text("1")
    socket.sethostname(NODE)


def mount_control_groups() -> None:
    """Mount the kernel's control groups at the usual place (a bare chroot has none)."""
    hierarchies = [line.split(":")[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if hierarchies == [""]:
        _run("mount", "-t", "cgroup2", "cgroup2", CONTROL_GROUPS)
        return
    _run("mount", "-t", "tmpfs", "tmpfs", CONTROL_GROUPS)
    for names in filter(None, hierarchies):
        place = CONTROL_GROUPS / names.removeprefix("name=")
        place.mkdir()
        _run("mount", "-t", "cgroup", "-o", f"none,{names}" if names.startswith("name=") else names, "cgroup", place)
        for name in names.split(",")[1:]:
            (CONTROL_GROUPS / name).symlink_to(place.name)


def remove_control_groups(name: str) -> None:
    """Remove the cluster's groups, the deepest first.  Its processes are gone by now."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            Path(folder).rmdir()


def supervise(cluster: Cluster, descriptor: int) -> None:
    """Start the relay and the components in order; start again what ends.  Never returns."""
    relay = [sys.executable, "-m", "e2e.rig.relay", str(descriptor), "127.0.0.1", str(API_PORT)]
    running = {_start(cluster, {"name": "relay", "command": relay, "environment": {}}, descriptor).pid: None}
    for component in json.loads((cluster.config / "components.json").read_text()):
        running[_start(cluster, component).pid] = component
        _wait_until_ready(component)
    while True:
        pid, status = os.wait()  # orphans of containers come here too
        component = running.pop(pid, None)
        if component is not None:
            print(f"box: {component['name']} ended with status {status}; starting it again", flush=True)
            time.sleep(RESTART_SECONDS)
            running[_start(cluster, component).pid] = component


def _start(cluster: Cluster, component: dict[str, Any], *descriptors: int) -> "subprocess.Popen[bytes]":
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **component["environment"]}
    with (cluster.log / f"{component['name']}.log").open("ab") as log:
        return subprocess.Popen(
            component["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=descriptors
        )


def _wait_until_ready(component: dict[str, Any]) -> None:
    """Return when the component answers, or after START_SECONDS: those that follow try again by themselves."""
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


def _hierarchies() -> list[Path]:
    if (CONTROL_GROUPS / "cgroup.controllers").exists():
        return [CONTROL_GROUPS]
    return [path for path in CONTROL_GROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def _own_root() -> None:
    """Make this process's root directory the root of its mount namespace, and keep its mounts apart from the machine's.

    In a chroot it is not, and then whoever enters a container's namespace comes out at the machine's root instead of the
    container's.  On a machine that is no chroot there is nothing to exchange.
    """
    here, root = Path.cwd(), os.open("/", os.O_PATH)
    with Path("/proc/self/ns/mnt").open() as namespace:
        _call(LIBC.setns, namespace.fileno(), CLONE_NEWNS)  # its own: sets the root directory to the namespace's
    place = str(Path(f"/proc/self/fd/{root}").readlink())
    os.close(root)
    _run("mount", "--make-rprivate", "/")
    if place != "/":
        _run("mount", "--rbind", place, place)
        machine = os.open("/", os.O_PATH)
        os.chdir(place)
        _run("pivot_root", ".", ".")  # the machine's root now lies over the new one
        os.fchdir(machine)
        os.close(machine)
        _call(LIBC.umount2, b".", MNT_DETACH)
    os.chdir(here)
    _run("mount", "-t", "proc", "proc", "/proc")


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{arguments}: {os.strerror(number)}")


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
