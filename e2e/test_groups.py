"""A worker of two pods, each with an engine of ours: it answers, restarts as a whole when one of
its pods is killed, and drains through its leader when it is scaled away.
"""

import json
from collections.abc import Iterator

import pytest

from e2e.client_program import Stories
from e2e.groups import (
    FOLLOWER,
    LEADER,
    SCALER,
    TWO_PODS,
    addresses,
    every_pod,
    restart_notes,
    uids,
    wait_for_groups,
)
from e2e.harness import NAME, Json, Kubernetes, example
from e2e.streams import URL, cut, metric, streams

BEGIN_SECONDS = 120.0
STREAM_SECONDS = 300.0


@pytest.fixture
def wide(operator: Kubernetes) -> Iterator[Kubernetes]:
    """The example with one mixed worker of two pods, and a client pod."""
    body = example()
    spec = body["spec"]
    spec["engine"] |= {"dataParallelSize": 2, "maxModelLen": 2048, "kvCacheMemory": "256Mi"}
    small = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "3Gi"}}
    spec["roles"] = {"mixed": {"pools": [TWO_PODS], "resources": small}}
    del spec["routing"]
    operator.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found", "--wait")
    operator.kubectl("apply", "--filename=-", stdin=json.dumps(body))
    operator.start_client()
    wait_for_groups(operator, 1)
    yield operator
    operator.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found", "--wait")


def answers(cluster: Kubernetes) -> list[Json]:
    """Eight answers, four at a time."""
    return cluster.ask("load", URL, 8, 4)


def test_engines_in_two_pods_answer_behind_one_service(wide: Kubernetes) -> None:
    (leader,), (follower,) = wide.pods(LEADER), wide.pods(FOLLOWER)
    assert metric(wide, leader, "pdcluster_engine_up") == 2

    found = answers(wide)

    assert [answer["status"] for answer in found] == [200] * 8
    assert all("Paris" in answer["text"] for answer in found)
    # there is no such number before the first request
    assert metric(wide, leader, "pdcluster_engine_requests_total") == 8
    assert addresses(wide) == {leader["status"]["podIP"]}
    assert follower["status"]["podIP"] not in addresses(wide)


@pytest.mark.parametrize("role", [FOLLOWER, LEADER])
def test_a_killed_pod_restarts_its_whole_worker(wide: Kubernetes, role: str) -> None:
    before = uids(every_pod(wide))
    (victim,) = wide.pods(role)

    wide.kubectl("delete", f"pod/{victim['metadata']['name']}", "--force", "--grace-period=0")
    wait_for_groups(wide, 1, gone=before)

    assert [answer["status"] for answer in answers(wide)] == [200] * 8
    notes = restart_notes(wide)
    assert any(f"pod {victim['metadata']['name']}: " in note for note in notes), notes


def test_a_worker_that_is_scaled_away_drains_through_its_leader(wide: Kubernetes) -> None:
    wide.kubectl("scale", SCALER, "--replicas=2")
    wait_for_groups(wide, 2)
    stories = Stories(count=12, clients=12, max_tokens=60, words=40)

    with streams(wide, stories) as running:
        running.wait_begun(6, BEGIN_SECONDS)
        wide.kubectl("scale", SCALER, "--replicas=1")
        found = running.wait_ended(STREAM_SECONDS)
        wait_for_groups(wide, 1)

    assert cut(found, running.stories) == []
    names = {pod["metadata"]["labels"]["pdcluster.io/worker"][-2:] for pod in every_pod(wide)}
    assert names == {"-0"}
    sets = wide.get("statefulsets", f"--selector=pdcluster.io/cluster={NAME},pdcluster.io/worker")
    assert len(sets["items"]) == 2
