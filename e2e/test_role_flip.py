"""A prefill worker decodes while decode is short of one and the budget has no room: its pod and its
process stay, and no request fails.
"""

from collections.abc import Iterator

import pytest

from e2e.client_program import Stories
from e2e.harness import LOOK_SECONDS, NAME, Json, Kubernetes, example, ready
from e2e.streams import cut, streams
from tests.system.waiting import wait_for

SECONDS = 300.0
POOL = {"name": "cpu", "gpu": "cpu", "minReplicas": 1, "maxReplicas": 2, "flexible": True}
# A line that LONG_ANSWERS crosses with one decode worker, in bfloat16 too.  A change of role waits
# for a minute; the window is longer, so that prefill, which is idle, does not shrink first.
AUTOSCALE: Json = {
    "mode": "On",
    "intervalSeconds": 5,
    "budget": {"total": 3},
    "decode": {"queueUp": 4, "queueDown": 1, "kvUsageUp": 0.08, "kvUsageDown": 0.02},
    "scaleDown": {"windowSeconds": 200},
}
LONG_ANSWERS = Stories(count=2000, clients=32, max_tokens=300, words=8, seconds=150)


@pytest.fixture
def flexible(chat: Kubernetes) -> Iterator[Kubernetes]:
    """Two prefill workers and one of decode, which may change their roles."""
    spec = {**example()["spec"], "autoscale": AUTOSCALE}
    for role, replicas in (("prefill", 2), ("decode", 1)):
        spec["roles"][role]["pools"] = [{**POOL, "replicas": replicas}]
    chat.replace(spec)
    wait_columns(chat, "2/2", "1/1")
    yield chat
    chat.replace(example()["spec"])


def status(cluster: Kubernetes) -> Json:
    found: Json = cluster.get(f"pdc/{NAME}").get("status", {})
    return found


def wait_columns(cluster: Kubernetes, prefill: str, decode: str) -> None:
    """Wait for these numbers of ready and desired workers, by the role that they serve."""
    wait_for(
        lambda: [status(cluster).get(role) for role in ("prefill", "decode")] == [prefill, decode],
        SECONDS,
        lambda: f"{status(cluster)}\n{cluster.kubectl('get', 'pods,pdc')}",
        poll_seconds=LOOK_SECONDS,
    )


def lives(cluster: Kubernetes) -> dict[str, tuple[str, int]]:
    """Uid and restarts of each ready prefill pod, by its name."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(each["restartCount"] for each in pod["status"]["containerStatuses"]),
        )
        for pod in ready(cluster.pods("pdcluster.io/role=prefill"))
    }


@pytest.mark.long
def test_prefill_worker_decodes_under_load_and_goes_back(flexible: Kubernetes) -> None:
    before = lives(flexible)
    with streams(flexible, LONG_ANSWERS) as running:
        wait_columns(flexible, "1/1", "2/2")
        (flipped,) = status(flexible)["autoscaling"]["flipped"]
        assert (flipped["role"], flipped["workers"]) == ("prefill", 1)
        assert f"{flipped['statefulSet']}-0" in before
        answers = running.wait_ended(SECONDS)
    assert (len(answers) >= LONG_ANSWERS.clients, cut(answers, LONG_ANSWERS)) == (True, [])
    newest = status(flexible)["autoscaling"]["lastDecisions"]
    assert any(step["rule"] == "flip" for each in newest for step in each["steps"])
    wait_columns(flexible, "2/2", "1/1")
    assert lives(flexible) == before
