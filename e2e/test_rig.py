"""The test cluster itself, with plain pods: they run, names resolve, Services answer, and its parts do as they say."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from e2e.harness import Json, Kubernetes
from e2e.rig import cluster as rig
from e2e.rig.__main__ import main
from e2e.rig.images import CACHE_MOUNT
from e2e.rig.paths import IMAGES, REPOSITORY, Cluster
from e2e.rig.relay import relay
from e2e.rig.shell import CommandError, install_packages, run
from tests.system.waiting import wait_for

ON_THE_RIG = pytest.mark.skipif("PDCLUSTER_KUBECONFIG" in os.environ, reason="a cluster of somebody else's")
PLAIN = "e2e-plain"


def plain_objects() -> str:
    """A web server in a pod with the volume `models`, and its Service."""
    container = {
        "name": "web",
        "image": IMAGES.busybox,
        "command": ["httpd", "-f", "-p", "8080", "-h", "/models"],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "readinessProbe": {"httpGet": {"path": "/smollm2-135m-instruct/config.json", "port": 8080}, "periodSeconds": 1},
    }
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    spec = {"containers": [container], "volumes": [volume], "terminationGracePeriodSeconds": 0}
    metadata = {"name": PLAIN, "labels": {"app": PLAIN}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    ports = [{"port": 80, "targetPort": 8080}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": {"app": PLAIN}, "ports": ports}}
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [pod, service]})


@ON_THE_RIG
def test_plain_pod_runs_and_its_service_answers_by_name(cluster: Kubernetes) -> None:
    cluster.kubectl("apply", "--filename=-", stdin=plain_objects())
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{PLAIN}", "--timeout=60s")

    cluster.start_client()  # the web server's own image is static: its C library has no names but the hosts file's

    def page() -> Json:
        (answer,) = cluster.ask("get", f"http://{PLAIN}.default/smollm2-135m-instruct/config.json")
        return answer

    wait_for(lambda: page()["status"] == 200, 30.0, page)  # a new Service takes a moment to be known by name and by address
    assert json.loads(page()["text"])["model_type"] == "llama"
    assert "GET" not in cluster.kubectl("logs", PLAIN)  # logs are reached; busybox writes none
    cluster.kubectl("delete", "pod,service", PLAIN)


@ON_THE_RIG
def test_machine_has_no_interface_mount_or_rule_of_the_cluster(cluster: Kubernetes) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}

    assert not {name for name in interfaces if name in ("cni0", "node0", "node1")}
    assert str(Cluster().root) not in Path("/proc/self/mountinfo").read_text()
    assert cluster.kubeconfig.stat().st_mode & 0o077 == 0


def test_dockerfiles_are_built_without_cache_mounts_and_otherwise_whole() -> None:
    for name in ("Dockerfile.worker", "Dockerfile.operator"):
        text = (REPOSITORY / name).read_text()
        built = CACHE_MOUNT.sub("", text)
        assert "--mount" not in built
        assert built.count("\nRUN ") == text.count("\nRUN ")


def test_process_of_another_program_is_not_taken_for_the_cluster(tmp_path: Path) -> None:
    here = Cluster(tmp_path)
    assert not rig.is_running(here)

    here.pid_file.write_text(str(os.getpid()))

    assert not rig.is_running(here)


def test_removing_a_cluster_that_does_not_exist_does_nothing(tmp_path: Path) -> None:
    rig.down(Cluster(tmp_path / "none"))

    assert not (tmp_path / "none").exists()


def test_files_of_a_cluster_that_died_are_removed(tmp_path: Path) -> None:
    here = Cluster(tmp_path / "dead")
    here.log.mkdir(parents=True)

    rig.down(here)

    assert not here.root.exists()


def test_failed_command_is_told_with_its_words() -> None:
    with pytest.raises(CommandError, match=r"(?s)^sh -c .*: exit 3\nno such luck"):
        run(["sh", "-c", "echo no such luck >&2; exit 3"])


def test_missing_packages_are_named_where_they_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(CommandError, match="missing packages: some-package: install them"):
        install_packages({"sh": "dash", "no-such-command": "some-package"})


def test_unknown_word_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sideways"]) == 2
    assert "usage: python -m e2e.rig up | down" in capsys.readouterr().err


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


async def test_relay_closes_a_connection_when_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    relaying = asyncio.create_task(relay(listener, "127.0.0.1", port))
    reader, writer = await asyncio.open_connection(*address)

    assert await reader.read() == b""

    writer.close()
    await end(relaying)
