"""The engine containers of one rendered worker of two pods, as processes that each have an address
of their own on loopback.
"""

import contextlib
import os
import re
import subprocess
from pathlib import Path
from typing import Self

import psutil
import yaml

from pdcluster_api.manifests.render import render_workload
from pdcluster_schema.ports import MASTER_PORT
from tests.operator.pdcluster_api.manifests.rendering import OWNER, by_name, record_of
from tests.ports import free_port, free_ports
from tests.schema.object_cases import at, both, vllm
from tests.system.client import MODEL, Json
from tests.system.cluster import Cluster
from tests.system.stock_vllm import BLOCK, FOLDER, MAX_MODEL_LEN, NUM_BLOCKS
from tests.system.worker_process import WorkerProcess

LEADER, FOLLOWER = ADDRESSES = "127.0.0.2", "127.0.0.3"
GRACE_SECONDS = 30.0


def two_pods(role: str, **sizes: int) -> Json:
    """Engine containers of both pods, with half of the ranks each, and the section `engine` of the
    leader's server process.
    """
    pool = {"name": "cpu", "gpu": "cpu", "replicas": 1}
    wide = {**pool, "podsPerReplica": 2}
    roles = {"mixed": wide} if role == "mixed" else {"prefill": pool, "decode": pool, role: wide}
    engine = {
        "args": ["--enforce-eager"],
        "maxModelLen": MAX_MODEL_LEN,
        "blockSize": BLOCK,
        "numBlocks": NUM_BLOCKS,
        "threads": 1,
        **sizes,
    }
    change = both(
        vllm(**engine),
        at("spec.model.name", MODEL),
        at("spec.model.dtype", "float32"),
        at("spec.roles", {name: {"pools": [pool]} for name, pool in roles.items()}),
    )
    leader, followers, config = render_workload(record_of(change, role=role), 1, OWNER)
    first = leader["spec"]["template"]["spec"]["initContainers"]
    others = followers["spec"]["template"]["spec"]["containers"]
    return {
        "containers": [by_name(first)["engine"], by_name(others)["engine"]],
        "settings": yaml.safe_load(config["data"]["engine.yaml"])["engine"],
    }


class StockPods:
    """logs: their folder; role: of the worker; sizes: of its engine, 2 ranks in all."""

    def __init__(self, model: Path, logs: Path, role: str, **sizes: int) -> None:
        rendered = two_pods(role, **sizes)
        self.model, self.role = model, role
        self._containers, self._logs = rendered["containers"], logs
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        ports = {"port": free_port()}
        ports |= {name: free_ports(2) for name in ("kvEventsPort", "sideChannelPort")}
        self._values = {
            "8100": str(ports["port"]),
            "8101": str(ports["kvEventsPort"]),
            "8200": str(ports["sideChannelPort"]),
            str(MASTER_PORT): str(free_port()),
            "$(LWS_LEADER_ADDRESS)": LEADER,
        }
        # vLLM's own default is free in a pod
        self._more = ("--data-parallel-rpc-port", str(free_port()))
        self.settings: Json = rendered["settings"]
        self.settings["vllm"] |= ports

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        for index, address in enumerate(ADDRESSES):
            values = {**self._values, "$(POD_IP)": address, "$(LWS_WORKER_INDEX)": str(index)}
            container = self._containers[index]
            _, serve, _, *flags = (_filled(text, values) for text in container["command"])
            # a pod has one address, and vLLM finds it
            variables = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "lo"} | {
                each["name"]: _filled(each.get("value", ""), values)
                for each in container["env"]
                if each["name"] != "VLLM_LOGGING_CONFIG_PATH" and "valueFrom" not in each
            }
            with (self._logs / f"pod-{index}.log").open("ab") as log:
                program = (str(FOLDER / "bin" / "vllm"), serve, str(self.model))
                self._pods[address] = subprocess.Popen(
                    [*program, *flags, *self._more],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **variables},
                )

    def __exit__(self, *_: object) -> None:
        for address, pod in self._pods.items():
            if pod.poll() is None:
                self.kill(address)

    def kill(self, address: str) -> None:
        """End all processes of a pod at once."""
        pod = psutil.Process(self._pods[address].pid)
        for process in (*pod.children(recursive=True), pod):
            process.kill()
        self._pods[address].wait()

    def end(self) -> None:
        """End both as the kubelet does: what has not ended in time is killed."""
        pods = [pod for pod in self._pods.values() if pod.poll() is None]
        rest = [each for pod in pods for each in psutil.Process(pod.pid).children(recursive=True)]
        for pod in pods:
            pod.terminate()
        for pod in pods:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.wait(GRACE_SECONDS)
        for process in (*rest, *pods):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for pod in pods:
            pod.wait()


def add_worker(cluster: Cluster, pods: StockPods) -> WorkerProcess:
    """Start the server process in the leader's pod."""
    name = f"{cluster.name}-{pods.role}-0"
    worker = cluster.add_worker(pods.role, name, model=pods.model, start=False)
    worker.settings["engine"] = pods.settings
    worker.settings["listen"]["host"] = LEADER
    worker.environment["POD_IP"] = LEADER
    worker.start()
    return worker


def _filled(text: str, values: dict[str, str]) -> str:
    pattern = "|".join(re.escape(each) for each in values)
    return re.sub(pattern, lambda found: values[found[0]], text)
