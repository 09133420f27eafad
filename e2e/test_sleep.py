"""Scale to zero and wake on a cluster: both roles go after a time without requests, and the next
request wakes them and is answered.

An object of its own beside the example: a router, and a pool of each role.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.harness import Json, Kubernetes, example, wait_until

NAME = "sleeper"
URL = f"http://{NAME}:8000"
SELECTOR = f"pdcluster.io/cluster={NAME}"
ROLES = ("prefill", "decode")
WAIT_SECONDS = 110  # of a request for a worker; the client gives up after 120
STORY = {"count": 1, "clients": 1, "max_tokens": 8, "words": 20}


def spec() -> Json:
    given = example()["spec"]
    pool = {"name": "cpu", "replicas": 1, "minReplicas": 0, "maxReplicas": 1}
    return {
        "model": given["model"],
        "engine": given["engine"],
        "roles": {
            "router": {"pools": [{"name": "cpu", "replicas": 1}]},
            **{
                role: {"pools": [pool], "resources": given["roles"][role]["resources"]}
                for role in ROLES
            },
        },
        "qos": {"admission": {"workerWaitSeconds": WAIT_SECONDS}},
        "autoscale": {"mode": "On", "scaleDown": {"windowSeconds": 30}},
    }


@pytest.fixture
def sleeper(operator: Kubernetes) -> Iterator[Kubernetes]:
    """A cluster that serves, and a client pod."""
    body = {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": NAME},
        "spec": spec(),
    }
    operator.kubectl("apply", "--filename=-", stdin=json.dumps(body))
    operator.start_client()
    wait_until(operator, lambda: reason(operator, "Serving") == "Answering")
    yield operator
    operator.kubectl("delete", f"pdc/{NAME}")
    wait_until(operator, lambda: not operator.get("pods", f"--selector={SELECTOR}")["items"])


def reason(cluster: Kubernetes, kind: str) -> str:
    """The reason of a condition of the object; empty while there is none."""
    conditions = cluster.get(f"pdc/{NAME}").get("status", {}).get("conditions", [])
    return next((each["reason"] for each in conditions if each["type"] == kind), "")


def workers(cluster: Kubernetes) -> list[Json]:
    of_roles = f"pdcluster.io/role in ({','.join(ROLES)})"
    return cluster.get("pods", f"--selector={SELECTOR},{of_roles}")["items"]


def is_asleep(cluster: Kubernetes) -> bool:
    return reason(cluster, "Serving") == "ScaledToZero" and not workers(cluster)


@pytest.mark.long
def test_pools_sleep_after_their_last_request_and_the_next_one_wakes_them(
    sleeper: Kubernetes, record_property: Callable[[str, object], None]
) -> None:
    (first,) = sleeper.ask("ask", URL, "auto")
    assert (first["status"], "Paris" in first["text"]) == (200, True), first
    wait_until(sleeper, lambda: is_asleep(sleeper))
    assert reason(sleeper, "Ready") == "ScaledToZero"
    (models,) = sleeper.ask("get", f"{URL}/v1/models")
    assert [each["id"] for each in json.loads(models["text"])["data"]] == [spec()["model"]["name"]]

    asked = time.monotonic()
    with sleeper.load("streams", URL, json.dumps(STORY)) as stream:
        assert stream.stdout is not None
        begun = json.loads(stream.stdout.readline())
        seconds = time.monotonic() - asked
        ended = json.loads(stream.stdout.readline())
    assert begun.get("begun"), begun
    assert (ended["status"], ended["done"]) == (200, True), ended
    record_property("seconds_from_sleep_to_the_first_token", round(seconds, 1))
    print(f"from sleep to the first token: {seconds:.1f} s")
    wait_until(sleeper, lambda: reason(sleeper, "Ready") == "AsDeclared")
    assert len(workers(sleeper)) == len(ROLES)
