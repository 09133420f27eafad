"""The test cluster itself, with plain pods: they run, names resolve, Services answer, and its parts
do as they say.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import harness
from e2e.harness import Json, Kubernetes
from e2e.rig import cluster as rig
from e2e.rig import removal
from e2e.rig.__main__ import main
from e2e.rig.images import MOUNT, ROOM_GB, ask_for_room, released
from e2e.rig.paths import IMAGES, REPOSITORY, Cluster
from e2e.rig.relay import relay
from e2e.rig.removal import UPLINK
from e2e.rig.shell import CommandError, install_packages, run
from tests.system.waiting import wait_for

ON_THE_RIG = pytest.mark.skipif(
    "PDCLUSTER_KUBECONFIG" in os.environ, reason="a cluster that is not the rig's"
)
PLAIN = "e2e-plain"


def plain_objects() -> str:
    """A web server in a pod with the volume `models`, and its Service."""
    container = {
        "name": "web",
        "image": IMAGES.busybox,
        "command": ["httpd", "-f", "-p", "8080", "-h", "/models"],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "readinessProbe": {
            "httpGet": {"path": "/smollm2-135m-instruct/config.json", "port": 8080},
            "periodSeconds": 1,
        },
    }
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    spec = {"containers": [container], "volumes": [volume], "terminationGracePeriodSeconds": 0}
    metadata = {"name": PLAIN, "labels": {"app": PLAIN}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    ports = [{"port": 80, "targetPort": 8080}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": {"app": PLAIN}, "ports": ports},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [pod, service]})


@ON_THE_RIG
def test_plain_pod_runs_and_its_service_answers_by_name(cluster: Kubernetes) -> None:
    cluster.kubectl("apply", "--filename=-", stdin=plain_objects())
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{PLAIN}", "--timeout=60s")

    # the web server's own image is static: its C library has no names but the hosts file's
    cluster.start_client()

    def page() -> Json:
        (answer,) = cluster.ask("get", f"http://{PLAIN}.default/smollm2-135m-instruct/config.json")
        return answer

    # a new Service takes a moment to be known by name and by address
    wait_for(lambda: page()["status"] == 200, 30.0, page)
    assert json.loads(page()["text"])["model_type"] == "llama"
    assert "GET" not in cluster.kubectl("logs", PLAIN)  # logs are reached; busybox writes none
    cluster.kubectl("delete", "pod,service", PLAIN)


@ON_THE_RIG
def test_machine_has_no_interface_mount_or_rule_of_the_cluster(cluster: Kubernetes) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}

    assert not {name for name in interfaces if name in ("cni0", "node0", "node1", UPLINK)}
    assert str(Cluster().root) not in Path("/proc/self/mountinfo").read_text()
    assert cluster.kubeconfig.stat().st_mode & 0o077 == 0


def test_dockerfiles_are_built_without_mounts_and_otherwise_whole() -> None:
    for name in ("Dockerfile.worker", "Dockerfile.operator"):
        text = (REPOSITORY / name).read_text()
        built = MOUNT.sub("", text)
        assert "--mount" not in built
        assert built.count("\nRUN ") == text.count("\nRUN ")


@ON_THE_RIG
def test_disk_without_room_for_an_image_is_refused_before_it_is_built(
    cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROOM_GB, "localhost/huge:e2e", 10**9)
    monkeypatch.setitem(ROOM_GB, IMAGES.operator, 10**9)

    with pytest.raises(
        CommandError, match=r"localhost/huge:e2e takes 1000000000 GB .* PDCLUSTER_CACHE"
    ):
        ask_for_room("localhost/huge:e2e")
    ask_for_room(IMAGES.operator)  # it is there


@contextlib.contextmanager
def process_with(command: list[str], *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits, with these words in its command; ended with the block."""
    waiting = [*command, sys.executable, "-c", "import signal; signal.pause()", *words]
    process = subprocess.Popen(waiting)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_it_holds(holder: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has started the one that ends with it."""
    wait_for(
        lambda: Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(),
        10.0,
        "the process that it holds",
    )


BOX = ("-m", "e2e.rig.box", "run")
HOLDING = ["unshare", "--pid", "--fork", "--kill-child"]


def test_process_of_another_program_or_cluster_is_not_taken_for_the_cluster(tmp_path: Path) -> None:
    local = Cluster(tmp_path / "here")
    with (
        process_with([], *BOX, str(local.root), "3"),
        process_with(HOLDING, *BOX, f"{local.root}-other", "3") as holder,
    ):
        wait_until_it_holds(holder)  # else its end would not be that of what it is about to start
        assert not removal.is_running(local)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as the cluster does")
def test_cluster_ends_without_the_files_that_a_user_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = Cluster(tmp_path / "gone")
    with process_with(HOLDING, *BOX, str(local.root), "3") as holder:
        wait_until_it_holds(holder)
        assert removal.is_running(local)
        # this process is its parent, and until it waits, the ended one is still listed
        ending = threading.Thread(target=holder.wait)
        ending.start()

        removal.down(local)

        ending.join(10.0)
        assert not removal.is_running(local)
        assert holder.returncode != 0
    assert "are gone: ending the processes that are left of it" in capsys.readouterr().out


def test_ending_a_cluster_needs_nothing_that_is_to_be_installed() -> None:
    """`make clean` removes `.venv`, and a cluster may be up."""
    program = (
        f"import sys; sys.path.append({str(REPOSITORY)!r}); import e2e.rig.__main__, "
        "e2e.rig.control_groups"
    )
    run([sys.executable, "-I", "-S", "-c", program])


def test_logs_are_kept_once_and_links_between_them_are_not(tmp_path: Path) -> None:
    local, kept = Cluster(tmp_path / "cluster"), tmp_path / "artifacts" / "rig"
    removal.save_logs(local, kept)
    assert not kept.exists()
    (local.log / "pods" / "default_web").mkdir(parents=True)
    (local.log / "containers").mkdir()
    (local.log / "containers" / "web.log").symlink_to("/var/log/pods/default_web/0.log")
    for text in ("first", "first\nsecond"):
        (local.log / "kubelet.log").write_text(text)
        (local.log / "pods" / "default_web" / "0.log").write_text(text)
        removal.save_logs(local, kept)

    assert {str(path.relative_to(kept)) for path in kept.rglob("*.log")} == {
        "kubelet.log",
        "pods/default_web/0.log",
    }
    assert (kept / "kubelet.log").read_text() == "first\nsecond"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as the cluster does")
def test_rig_that_does_not_start_leaves_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Cluster(tmp_path / "cluster")

    def fail(cluster: Cluster) -> None:
        cluster.log.mkdir(parents=True)
        (cluster.log / "box.log").write_text("no such mount")
        raise CommandError("the cluster did not start")

    monkeypatch.delenv("PDCLUSTER_KUBECONFIG", raising=False)
    monkeypatch.setattr(harness, "RigCluster", lambda: local)
    monkeypatch.setattr(harness, "ARTIFACTS", tmp_path / "artifacts")
    monkeypatch.setattr(rig, "up", fail)
    with pytest.raises(CommandError, match="did not start"), harness.kubernetes():
        pass

    assert (tmp_path / "artifacts" / "rig" / "box.log").read_text() == "no such mount"
    assert not local.root.exists()


def test_failed_test_on_the_rig_leaves_the_logs_of_the_rig(tmp_path: Path) -> None:
    local = Cluster(tmp_path / "cluster")
    local.log.mkdir(parents=True)
    (local.log / "kubelet.log").write_text("evicted")
    cluster = Kubernetes(tmp_path / "no-kubeconfig", rig=local)

    harness.save_state(cluster, tmp_path / "artifacts" / "test_x-call")

    assert (tmp_path / "artifacts" / "rig" / "kubelet.log").read_text() == "evicted"


def test_removing_a_cluster_that_does_not_exist_does_nothing(tmp_path: Path) -> None:
    removal.down(Cluster(tmp_path / "none"))

    assert not (tmp_path / "none").exists()


def test_files_of_a_cluster_that_died_are_removed(tmp_path: Path) -> None:
    local = Cluster(tmp_path / "dead")
    local.log.mkdir(parents=True)

    removal.down(local)

    assert not local.root.exists()


def test_failed_command_is_reported_with_its_words() -> None:
    with pytest.raises(CommandError, match=r"(?s)^sh -c .*: exit 3\nno such luck"):
        run(["sh", "-c", "echo no such luck >&2; exit 3"])


def test_missing_packages_are_named_where_they_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(CommandError, match="missing packages: some-package: install them"):
        install_packages({"sh": "dash", "no-such-command": "some-package"})


def test_release_without_an_image_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("e2e.rig.images.DIST", tmp_path)

    with pytest.raises(CommandError, match=r"PDCLUSTER_E2E_DIST is .*has 0 files x-\*\.oci\.tar"):
        released("x-*.oci.tar")


def test_unknown_word_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sideways"]) == 2
    assert "usage: python -m e2e.rig up | node | down" in capsys.readouterr().err


async def end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_relay_carries_both_directions_to_their_ends() -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async with await asyncio.start_server(upper, "127.0.0.1", 0) as target:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        relaying = asyncio.create_task(relay(listener, *target.sockets[0].getsockname()))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"hello" * 40_000)
        writer.write_eof()

        assert await reader.read() == b"HELLO" * 40_000

        writer.close()
        await end(relaying)


async def test_relay_closes_a_connection_when_no_server_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    relaying = asyncio.create_task(relay(listener, "127.0.0.1", port))
    reader, writer = await asyncio.open_connection(*address)

    assert await reader.read() == b""

    writer.close()
    await end(relaying)
