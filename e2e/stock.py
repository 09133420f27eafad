"""The object of examples/vllm.yaml as the test cluster runs it, and the engines in its pods."""

import time
from typing import Any

import yaml

from e2e.greedy import Greedy
from e2e.harness import LOOK_SECONDS, NAME, SELECTOR, Json, Kubernetes
from e2e.rig.paths import REPOSITORY
from e2e.streams import Streams, cut
from tests.system.waiting import wait_for

VLLM_EXAMPLE = REPOSITORY / "examples" / "vllm.yaml"
START_SECONDS = 900.0
"""Two vLLMs that start at once on two cores, beside the rest of the cluster."""

PREFILL, DECODE = "pdcluster.io/role=prefill", "pdcluster.io/role=decode"
SMALL: Json = {"requests": {"cpu": "100m", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
# Two cores have no room for the half core that every server process asks for by itself.
TEMPLATE: Json = {
    "spec": {"containers": [{"name": "worker", "resources": {"requests": {"cpu": "100m"}}}]}
}

NO_COMPILER: Json = {"name": "TORCHDYNAMO_DISABLE", "value": "1"}
"""The stand-in has none, which vLLM's log probabilities would be compiled with."""

KILL_ENGINE = """\
import os, signal
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) not in (1, os.getpid()):
        os.kill(int(name), signal.SIGKILL)
"""
"""Kills every process of vLLM but the container's first, which no signal from within kills: as a
crash of the process that computes.
"""


def stock_example(cluster: Kubernetes) -> Json:
    """examples/vllm.yaml under the name that all tests use, in float32 so that tokens can be
    compared, and small enough for two cores.
    """
    found: Json = yaml.safe_load(VLLM_EXAMPLE.read_text())
    found["metadata"]["name"] = NAME
    spec = found["spec"]
    spec["model"]["dtype"] = "float32"
    spec["engine"] |= {
        "image": cluster.images["vllm"],
        "maxModelLen": 2048,
        "maxSequences": 8,
        "kvCacheMemory": "256Mi",
        "threads": 1,
        "env": [NO_COMPILER],
    }
    for role in spec["roles"].values():
        role["resources"] = SMALL
    spec["podTemplate"] = TEMPLATE
    spec["qos"] = {"stallSeconds": 300}  # beside other work a step of long prompts takes a minute
    return found


def condition(cluster: Kubernetes, kind: str, name: str = NAME) -> Json:
    """Condition of an object; empty when it is not there."""
    conditions = cluster.get(f"pdc/{name}").get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def wait_for_condition(
    cluster: Kubernetes,
    kind: str,
    wanted: dict[str, str],
    *,
    name: str = NAME,
    seconds: float = START_SECONDS,
) -> Json:
    """Wait until an object's condition has these values; returns it."""

    def has_come() -> Json | None:
        found = condition(cluster, kind, name)
        return found if wanted.items() <= found.items() else None

    return (
        wait_for(
            has_come,
            seconds,
            lambda: (
                f"{kind}: {condition(cluster, kind, name)}\n{cluster.kubectl('get', 'pods,pdc')}"
            ),
            poll_seconds=LOOK_SECONDS,
        )
        or {}
    )


def only_pod(cluster: Kubernetes, role: str) -> Json:
    """The one pod of a role."""
    (pod,) = cluster.pods(role)
    return pod


def status_of(pod: Json, container: str) -> Json:
    """Status of one of its containers; empty before it has one."""
    status = pod["status"]
    listed = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return next((each for each in listed if each["name"] == container), {})


def restarts(pod: Json, container: str) -> int:
    """Number of times that a container was started again."""
    return int(status_of(pod, container).get("restartCount", 0))


def kill_engine(cluster: Kubernetes, pod: Json) -> None:
    """Kill what computes in the pod's engine, as a crash does."""
    program = ("exec", pod["metadata"]["name"], "--container=engine", "--", "python3", "-c")
    cluster.kubectl(*program, KILL_ENGINE)


def wait_gone(cluster: Kubernetes) -> None:
    """Wait until no worker is left, so that the next object finds room."""
    wait_for(
        lambda: not cluster.get("pods", f"--selector={SELECTOR},pdcluster.io/role")["items"],
        180.0,
        lambda: cluster.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )


def wait_left(cluster: Kubernetes, leaving: Json) -> None:
    """Wait until a pod is gone: until it has drained it is ready under its successor's name."""
    name, uid = leaving["metadata"]["name"], leaving["metadata"]["uid"]
    wait_for(
        lambda: all(
            pod["metadata"]["uid"] != uid
            for pod in cluster.get("pods", f"--field-selector=metadata.name={name}")["items"]
        ),
        START_SECONDS,
        lambda: cluster.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )


def elapsed(since: float) -> str:
    """Seconds since a time of the monotonic clock, for a note."""
    return f"{time.monotonic() - since:.0f} s"


def changed(found: Json, **engine: Any) -> Json:
    """The object with other values of `engine`."""
    spec = {**found["spec"], "engine": {**found["spec"]["engine"], **engine}}
    return {**found, "spec": spec}


def assert_greedy(answers: list[Json], running: Streams, greedy: Greedy) -> str:
    """None is missing, cut or not greedy; returns the figures."""
    stories = running.stories
    assert cut(answers, stories) == []
    assert len(answers) == stories.count
    excused = greedy.check(answers, stories.words)
    num_remote = sum(answer["prefill"] == "remote" for answer in answers)
    return f"{len(answers)} streams, {num_remote} prefilled remotely, {excused} tokens excused"
