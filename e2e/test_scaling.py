"""Pools are scaled by their scaler, and a decode worker can go while clients ask.

What is promised: a worker that is deleted or scaled away finishes what it has,
so no request fails.  One that is killed takes the requests with it whose
connections it holds, and no others.
"""

import json
from collections.abc import Iterator

import pytest

from e2e.harness import EXAMPLE, NAME, Json, Kubernetes
from e2e.operator_at_work import let_the_operator_look
from tests.system.waiting import wait_for

DECODE = "pdcluster.io/role=decode"
CLIENTS = 3
REQUESTS = 60
READY_SECONDS = 300.0


@pytest.fixture
def two_decoders(chat: Kubernetes) -> Iterator[Kubernetes]:
    """The example with a second decode worker, scaled by `kubectl scale`."""
    chat.kubectl("scale", f"pdps/{NAME}-decode-cpu", "--replicas=2")
    wait_for(
        lambda: num_ready(chat) == 2 and chat.is_ready(),
        READY_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
    )
    yield chat
    chat.kubectl("scale", f"pdps/{NAME}-decode-cpu", "--replicas=1")


def num_ready(cluster: Kubernetes) -> int:
    return sum(is_ready(pod) for pod in cluster.pods(DECODE))


def is_ready(pod: Json) -> bool:
    conditions = {
        condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])
    }
    return conditions.get("Ready") == "True"


def endpoints(cluster: Kubernetes) -> int:
    """Addresses behind the Service that take new connections."""
    slices = cluster.get("endpointslices", f"--selector=kubernetes.io/service-name={NAME}")["items"]
    return sum(
        bool(each["conditions"].get("ready"))
        for part in slices
        for each in part.get("endpoints") or []
    )


def test_kubectl_scale_adds_a_worker_and_an_unchanged_file_keeps_it(
    two_decoders: Kubernetes,
) -> None:
    before = {pod["metadata"]["uid"] for pod in two_decoders.pods(DECODE)}
    wait_for(lambda: endpoints(two_decoders) == 2, 30.0, "two endpoints of the Service")

    two_decoders.kubectl("apply", f"--filename={EXAMPLE}")
    let_the_operator_look(two_decoders)

    assert two_decoders.get(f"pdps/{NAME}-decode-cpu")["spec"]["replicas"] == 2
    assert {pod["metadata"]["uid"] for pod in two_decoders.pods(DECODE)} == before


@pytest.mark.parametrize(
    ("how", "most_failures"), [(["--wait=false"], 0), (["--force", "--grace-period=0"], CLIENTS)]
)
def test_deleted_decode_pod_fails_no_other_requests(
    two_decoders: Kubernetes, how: list[str], most_failures: int
) -> None:
    victim = two_decoders.pods(DECODE)[0]["metadata"]
    answers: list[Json] = []

    with two_decoders.load("load", f"http://{NAME}:8000", REQUESTS, CLIENTS) as load:
        assert load.stdout is not None
        for line in load.stdout:
            answers.append(json.loads(line))
            if len(answers) == CLIENTS:  # under way
                two_decoders.kubectl("delete", f"pod/{victim['name']}", *how)

    failed = [answer for answer in answers if answer["status"] != 200]
    assert len(answers) == REQUESTS
    assert len(failed) <= most_failures, failed
    assert all("Paris" in answer["text"] for answer in answers if answer["status"] == 200)
    wait_for(lambda: num_ready(two_decoders) == 2, READY_SECONDS, "the pod to be replaced")
    assert victim["uid"] not in {pod["metadata"]["uid"] for pod in two_decoders.pods(DECODE)}
