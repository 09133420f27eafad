"""Routers before workers: models listed while no worker runs, requests that wait for the first one,
and a router that dies.

An object of its own, beside the example: routers are quick to start, and its only worker starts
while the test waits for it anyway.
"""

import json
from collections.abc import Iterator

import pytest

from e2e.harness import Json, Kubernetes, example, wait_until

NAME = "routed"
URL = f"http://{NAME}:8000"
SELECTOR = f"pdcluster.io/cluster={NAME}"
WAIT_SECONDS = 100  # of a request for a worker; the client gives up after 120
CLIENTS = 3
REQUESTS = 18


def spec() -> Json:
    """The example's model and engine, one pool of mixed workers at zero, two routers."""
    given = example()["spec"]
    return {
        "model": given["model"],
        "engine": given["engine"],
        "roles": {
            "router": {"pools": [{"name": "cpu", "replicas": 2}]},
            "mixed": {
                "pools": [{"name": "cpu", "replicas": 0}],
                "resources": given["roles"]["decode"]["resources"],
            },
        },
        "qos": {"admission": {"workerWaitSeconds": WAIT_SECONDS}},
    }


@pytest.fixture
def routed(operator: Kubernetes) -> Iterator[Kubernetes]:
    """Two routers that are ready, no worker behind them, and a client pod."""
    body = {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": NAME},
        "spec": spec(),
    }
    operator.kubectl("apply", "--filename=-", stdin=json.dumps(body))
    operator.start_client()
    wait_until(operator, lambda: is_true(operator, "Ready"))
    yield operator
    operator.kubectl("delete", f"pdc/{NAME}")
    wait_until(operator, lambda: not operator.get("pods", f"--selector={SELECTOR}")["items"])


def is_true(cluster: Kubernetes, kind: str) -> bool:
    """Return whether a condition of the object is true."""
    conditions = cluster.get(f"pdc/{NAME}").get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def routers(cluster: Kubernetes) -> list[Json]:
    return cluster.get("pods", f"--selector={SELECTOR},pdcluster.io/role=router")["items"]


def columns(cluster: Kubernetes) -> list[str]:
    """Name, model, decode (or mixed) and router workers."""
    header, row = cluster.kubectl("get", f"pdc/{NAME}").splitlines()
    return [
        row[header.index(column) :].split()[0] for column in ("NAME", "MODEL", "DECODE", "ROUTER")
    ]


def listed_models(cluster: Kubernetes) -> list[str]:
    """Models as the Service's routers list them; none while it does not answer."""
    (answer,) = cluster.ask("get", f"{URL}/v1/models")
    return (
        [each["id"] for each in json.loads(answer["text"])["data"]]
        if answer["status"] == 200
        else []
    )


def test_routers_list_models_at_zero_hold_requests_for_the_first_worker_and_one_may_die(
    routed: Kubernetes,
) -> None:
    model = example()["spec"]["model"]["name"]
    assert columns(routed) == [NAME, model, "0/0", "2/2"]
    # the Service leads to a ready router a moment later
    wait_until(routed, lambda: listed_models(routed) == [model])

    with routed.load("ask", URL, "auto") as waiting:
        routed.kubectl("scale", f"pdps/{NAME}-mixed-cpu", "--replicas=1")
        assert waiting.stdout is not None
        first = json.loads(waiting.stdout.readline())
    assert (first["status"], "Paris" in first["text"]) == (200, True), first
    wait_until(routed, lambda: is_true(routed, "Serving"))

    victim, answers = routers(routed)[0]["metadata"]["name"], []
    with routed.load("load", URL, REQUESTS, CLIENTS) as load:
        assert load.stdout is not None
        for line in load.stdout:
            answers.append(json.loads(line))
            if len(answers) == CLIENTS:  # under way
                routed.kubectl("delete", f"pod/{victim}", "--force", "--grace-period=0")
    failed = [answer for answer in answers if answer["status"] != 200]
    again = [routed.ask("ask", URL, "auto")[0] for _ in failed]

    assert len(answers) == REQUESTS
    assert len(failed) <= CLIENTS, failed
    assert all("Paris" in answer["text"] for answer in (*answers, *again) if answer not in failed)
