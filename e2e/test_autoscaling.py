"""Workers come and go with the load, and none that goes takes a request with it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import EXAMPLE, NAME, Json, Kubernetes
from tests.system.waiting import wait_for

DECODE = "pdcluster.io/role=decode"
SECONDS = 300.0
CLIENTS = 12
REQUESTS = 600
# Lines that a small load on a small model crosses, and a window that a test can wait for.
AUTOSCALE = {
    "mode": "On",
    "intervalSeconds": 2,
    "decode": {"kvUsageUp": 0.02, "kvUsageDown": 0.005},
    "scaleDown": {"windowSeconds": 15},
    "budget": {"total": 3},
}


@pytest.fixture
def autoscaled(chat: Kubernetes) -> Iterator[Kubernetes]:
    """The example with the autoscaler on, with room for one worker more."""
    chat.kubectl("patch", f"pdc/{NAME}", "--type=merge", f"--patch={json.dumps({'spec': {'autoscale': AUTOSCALE}})}")
    yield chat
    chat.kubectl("replace", f"--filename={EXAMPLE}")


def num_decode(cluster: Kubernetes) -> int:
    return len(cluster.pods(DECODE))


def num_ready(cluster: Kubernetes) -> int:
    conditions = [pod["status"].get("conditions", []) for pod in cluster.pods(DECODE)]
    return sum(any(each["type"] == "Ready" and each["status"] == "True" for each in found) for found in conditions)


def answers_of(load: "subprocess.Popen[str]") -> list[Json]:
    assert load.stdout is not None
    return [json.loads(line) for line in load.stdout]


def failures(answers: list[Json]) -> list[Json]:
    return [answer for answer in answers if answer["status"] != 200 or "Paris" not in answer["text"]]


def test_decode_grows_with_the_load_and_shrinks_after_it(autoscaled: Kubernetes) -> None:
    wait_for(lambda: num_decode(autoscaled) == 1, SECONDS, "one decode worker to begin with")

    with autoscaled.load("load", f"http://{NAME}:8000", REQUESTS, CLIENTS) as load:
        wait_for(lambda: num_decode(autoscaled) == 2, SECONDS, lambda: autoscaled.get(f"pdc/{NAME}")["status"])
        answers = answers_of(load)

    assert (len(answers), failures(answers)) == (REQUESTS, [])
    wait_for(lambda: num_decode(autoscaled) == 1, SECONDS, lambda: autoscaled.get(f"pdc/{NAME}")["status"])
    why = [Path(sys.executable).with_name("pdctl"), "why", NAME, "--namespace=default", f"--kubeconfig={autoscaled.kubeconfig}"]
    told = subprocess.run(why, capture_output=True, text=True, check=True).stdout
    assert "kv_cache_usage" in told


def test_scaling_down_under_load_fails_no_request(chat: Kubernetes) -> None:
    chat.kubectl("scale", f"pdps/{NAME}-decode-cpu", "--replicas=2")
    wait_for(lambda: num_ready(chat) == 2, SECONDS, lambda: chat.kubectl("get", "pods,pdc"))

    with chat.load("load", f"http://{NAME}:8000", REQUESTS // 4, CLIENTS // 2) as load:
        assert load.stdout is not None
        first = json.loads(load.stdout.readline())  # under way
        chat.kubectl("scale", f"pdps/{NAME}-decode-cpu", "--replicas=1")
        answers = [first, *answers_of(load)]

    assert (len(answers), failures(answers)) == (REQUESTS // 4, [])
    wait_for(lambda: num_decode(chat) == 1, SECONDS, lambda: chat.kubectl("get", "pods,pdc"))
