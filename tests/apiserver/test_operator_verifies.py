"""The operator has real workers verify their KV transfer, and judges it by the floor.

The workers are processes of this machine that stand in for the operator's pods: they have the
engine files, certificates and names of those, and addresses of their own.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_api.manifests.objects import child_names
from pdcluster_schema import etcd_keys
from pdcluster_schema.labels import REVISION, ROLE
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.client import Json
from tests.system.conftest import make_model
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for
from tests.system.worker_process import WorkerProcess
from tests.transports import need_transport

ADDRESSES = {"prefill": "127.77.0.2", "decode": "127.77.0.3"}
"""Each worker has the ports of a pod, so it needs an address of its own."""

FLOOR = 1000.0
"""GB/s that no machine of one test has; another one is met by any."""


class Workers:
    """Processes in the place of a cluster's pods, of which each is ready once its process is."""

    def __init__(self, scene: Scene, etcd: EtcdServer, folder: Path, model: Path) -> None:
        self._scene, self._etcd, self._folder, self._model = scene, etcd, folder, model
        self._processes: dict[str, WorkerProcess] = {}
        self._ready: set[str] = set()

    def start(self) -> None:
        """One for each pod; returns once all are ready."""
        pods = self._pods()
        self._write_certificates()
        for name, pod in pods.items():
            worker = self._process(name, pod)
            self._processes[name] = worker
            worker.start()
        for name, worker in self._processes.items():
            worker.wait_ready()
            self._ready.add(name)

    def close(self) -> None:
        for worker in self._processes.values():
            worker.close()

    def rule(self, pod: Body) -> dict[str, Any] | None:
        """For `Nodes`."""
        address = ADDRESSES[pod["metadata"]["labels"][ROLE]]
        if pod["metadata"]["name"] not in self._ready:
            return None
        return {**ready(pod), "podIP": address, "podIPs": [{"ip": address}]}

    def _pods(self) -> dict[str, Body]:
        path = self._scene.path("Service").replace("services", "pods")
        wait_for(
            lambda: len(self._scene.pods()) == len(ADDRESSES),
            DEADLINE_SECONDS,
            lambda: f"pods: {self._scene.pods()}",
        )
        found = (self._scene.api.get(f"{path}/{name}") for name in self._scene.pods())
        return {pod["metadata"]["name"]: pod for pod in found if pod is not None}

    def _write_certificates(self) -> None:
        secret = self._scene.api.get(
            self._scene.path("Secret", child_names(self._scene.name).certificates)
        )
        assert secret is not None
        for name, content in secret["data"].items():
            (self._folder / name).write_bytes(base64.b64decode(content))

    def _process(self, name: str, pod: Body) -> WorkerProcess:
        labels = pod["metadata"]["labels"]
        settings, address = self._settings(pod), ADDRESSES[labels[ROLE]]
        settings["listen"] = {**settings.get("listen", {}), "host": address}
        worker = WorkerProcess(name, self._folder, settings, lambda: self._record(name, labels))
        worker.environment = {"POD_NAMESPACE": self._scene.namespace, "POD_IP": address}
        return worker

    def _settings(self, pod: Body) -> Json:
        """The engine file that the pod would mount, with the paths of this machine."""
        volumes = (volume.get("configMap") or {} for volume in pod["spec"]["volumes"])
        maps = (
            self._scene.api.get(self._scene.path("ConfigMap", each["name"]))
            for each in volumes
            if each
        )
        (text,) = (
            found["data"]["engine.yaml"]
            for found in maps
            if found and "engine.yaml" in found["data"]
        )
        settings: Json = yaml.safe_load(text)
        settings["model"]["path"] = str(self._model)
        settings["tls"] = {
            "ca": str(self._folder / "ca.crt"),
            "certificate": str(self._folder / "tls.crt"),
            "key": str(self._folder / "tls.key"),
        }
        return settings

    def _record(self, name: str, labels: dict[str, str]) -> Json | None:
        prefix = f"{etcd_keys.cluster_prefix(self._scene.namespace, self._scene.name)}workers/"
        found = {
            key.rpartition("/")[2]: yaml.safe_load(value)
            for key, value in self._etcd.values(f"{prefix}{labels[REVISION]}/").items()
        }
        return found.get(name)


@pytest.fixture
def scene(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> Iterator[tuple[Scene, Workers]]:
    """A PDCluster whose prefill workers ask for NIXL, which its decode workers do not have, and the
    floor; with real workers, not yet started.
    """
    etcd, scene = EtcdServer(tmp_path), Scene(PlainApi(control_plane.kubeconfig), namespace)
    etcd.start()
    workers = Workers(scene, etcd, tmp_path, make_model(tmp_path / "model", seed=0))
    scene.create(
        model={"name": "tiny", "path": "/models/tiny", "dtype": "float32"},
        roles={
            "prefill": {"pools": [{"name": "cpu", "replicas": 1}], "engine": {"transport": "nixl"}},
            "decode": {"pools": [{"name": "cpu", "replicas": 1}], "engine": {"transport": "tcp"}},
        },
        engine={"numBlocks": 128, "maxBatchedTokens": 256, "maxSequences": 8, "threads": 1},
        discovery={"etcd": {"endpoints": [etcd.endpoint]}},
        placement={"minTransferGBps": FLOOR},
    )
    try:
        with Nodes(scene.api, namespace, workers.rule):
            yield scene, workers
    finally:
        workers.close()
        etcd.close()


def test_transport_that_falls_back_under_the_floor_is_not_verified(
    control_plane: ControlPlane, scene: tuple[Scene, Workers], tmp_path: Path, namespace: str
) -> None:
    need_transport("nixl")
    chat, workers = scene
    with OperatorProcess(tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace):
        workers.start()

        slow = chat.await_condition("KVTransferVerified", "False", "TransferSlow")

        assert "over tcp, less than placement.minTransferGBps of 1000: " in slow["message"]
        (pair,) = chat.status["transfers"]["pairs"]
        assert (pair["transport"], pair["hasChecksum"], pair.get("fault")) == ("tcp", True, None)
        chat.until(
            lambda: "not nixl: the peer has not got it" in str(chat.status.get("disaggregation"))
        )
        chat.await_condition("Ready", "True")  # no answer is wrong

        chat.change(placement={"minTransferGBps": FLOOR / 1e9})
        chat.await_condition("KVTransferVerified", "True", "KVMoved")
        (same,) = chat.status["transfers"]["pairs"]
        assert (same["at"], same["bytesPerSecond"]) == (pair["at"], pair["bytesPerSecond"])
