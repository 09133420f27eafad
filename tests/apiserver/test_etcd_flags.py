"""The flags of a managed etcd, taken by a real etcd: members on loopback in place of pods."""

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest

from pdcluster_api.manifests.etcd import DATA_FOLDER
from pdcluster_api.manifests.render import Owner, RenderSettings, render_shared
from pdcluster_schema.load import parse
from tests.apiserver.control_plane import binary
from tests.ports import free_port
from tests.schema.object_cases import at, minimal
from tests.system.ipv6 import has_ipv6
from tests.system.waiting import wait_for

CLIENT, PEER = ":2379", ":2380"


def command(replicas: int) -> list[str]:
    """Command of the container."""
    document = minimal()
    if replicas > 1:
        at("spec.discovery.etcd", {"replicas": replicas, "storage": {"size": "1Gi"}})(document)
    owner, site = Owner("chat", "default", "a-uid"), RenderSettings("worker:1", "etcd:1", "system")
    shared = render_shared(parse(document), owner, site, "0a1b2c3d")
    kind = "Deployment" if replicas == 1 else "StatefulSet"
    (made,) = [each for each in shared if each["kind"] == kind]
    found: list[str] = made["spec"]["template"]["spec"]["containers"][0]["command"]
    return found


class Members:
    """Members of one cluster: pod names become loopback addresses, the folder of the data becomes
    one of the test's.
    """

    def __init__(self, folder: Path, replicas: int, quota_bytes: int | None = None) -> None:
        self._folder, self._command = folder, command(replicas)
        if quota_bytes is not None:
            quota = "--quota-backend-bytes="
            others = [flag for flag in self._command if not flag.startswith(quota)]
            self._command = [*others, f"{quota}{quota_bytes}"]
        names = [f"chat-etcd-{ordinal}" for ordinal in range(replicas)]
        self.client = {name: free_port() for name in names}
        self._peer = {name: free_port() for name in names}

    def flags(self, name: str) -> list[str]:
        """Flags of one member."""
        return [self._local(flag.replace("$(POD_NAME)", name), name) for flag in self._command[1:]]

    def _local(self, flag: str, name: str) -> str:
        for other, port in self._peer.items():
            flag = flag.replace(
                f"{other}.chat-etcd-peers.default.svc.cluster.local{PEER}", f"127.0.0.1:{port}"
            )
        flag = flag.replace(f"127.0.0.1{PEER}", f"127.0.0.1:{self._peer[name]}")
        flag = flag.replace(
            f"chat-etcd.default.svc.cluster.local{CLIENT}", f"127.0.0.1:{self.client[name]}"
        )
        flag = flag.replace(
            f"{name}.chat-etcd-peers.default.svc.cluster.local{CLIENT}",
            f"127.0.0.1:{self.client[name]}",
        )
        flag = flag.replace(f"0.0.0.0{CLIENT}", f"0.0.0.0:{self.client[name]}").replace(
            f"0.0.0.0{PEER}", f"0.0.0.0:{self._peer[name]}"
        )
        return flag.replace(DATA_FOLDER, str(self._folder / name))

    @contextmanager
    def running(self, *names: str) -> Iterator[None]:
        """The named members as processes, ended with the block."""
        launcher = str(files("pdctl.local").joinpath("launcher.py"))
        processes = []
        try:
            for name in names:
                (self._folder / name).mkdir(exist_ok=True)
                arguments = [
                    sys.executable,
                    "-I",
                    launcher,
                    str(os.getpid()),
                    str(binary("etcd")),
                    *self.flags(name),
                ]
                with (self._folder / f"{name}.log").open("ab") as log:
                    processes.append(
                        subprocess.Popen(
                            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                        )
                    )
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def put(self, body: dict[str, str], name: str) -> int:
        """Status code of a write."""
        url = f"http://127.0.0.1:{self.client[name]}/v3/kv/put"
        return _status(urllib.request.Request(url, json.dumps(body).encode()))

    def health(self, name: str, path: str = "/readyz", host: str = "127.0.0.1") -> int:
        """Status code of a probe's request; 0 = no answer."""
        return _status(f"http://{host}:{self.client[name]}{path}")

    def log(self) -> str:
        """The end of every member's log."""
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in sorted(self._folder.glob("*.log"))
        )


def _status(request: str | urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as e:
        e.close()
        return e.code
    except OSError:
        return 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_members_become_healthy_with_the_rendered_flags(tmp_path: Path, replicas: int) -> None:
    members = Members(tmp_path, replicas)
    with members.running(*members.client):
        wait_for(
            lambda: all(members.health(name) == 200 for name in members.client), 60, members.log
        )
        assert {members.health(name, "/livez") for name in members.client} == {200}


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_members_are_reached_over_ipv6_too(tmp_path: Path) -> None:
    members = Members(tmp_path, 1)
    (name,) = members.client
    with members.running(name):
        wait_for(lambda: members.health(name) == 200, 60, members.log)
        assert members.health(name, host="[::1]") == 200


def test_member_without_a_quorum_is_alive_and_not_ready(tmp_path: Path) -> None:
    members = Members(tmp_path, 3)
    first, *others = members.client
    with members.running(first):
        with members.running(*others):
            wait_for(lambda: members.health(first) == 200, 60, members.log)
        # its answer takes longer than the probe waits
        wait_for(lambda: members.health(first) != 200, 60, members.log)
        assert members.health(first, "/livez") == 200


def test_full_member_is_alive_and_ready_for_reads(tmp_path: Path) -> None:
    members = Members(tmp_path, 1, quota_bytes=4 << 20)
    (name,) = members.client
    with members.running(name):
        wait_for(lambda: members.health(name) == 200, 60, members.log)
        value = base64.b64encode(bytes(1 << 19)).decode()
        codes = [members.put({"key": "eA==", "value": value}, name) for _ in range(20)]
        assert codes[0] == 200 != codes[-1]
        assert members.health(name, "/health?serializable=true") == 503
        assert (members.health(name, "/livez"), members.health(name)) == (200, 200)
    with members.running(name):  # its data keeps the alarm
        wait_for(lambda: members.health(name) == 200, 60, members.log)
        assert members.health(name, "/livez") == 200
