"""Old workers serve and can be evicted while a new revision crashes; then it is given up."""

from collections.abc import Iterator

import pytest

from e2e.harness import LOOK_SECONDS, NAME, Json, Kubernetes, example, ready, wait_for_workers
from tests.system.waiting import wait_for

REVISION = "pdcluster.io/revision"
WORKERS, DECODE = "pdcluster.io/role", "pdcluster.io/role=decode"
DEADLINE_SECONDS = 90
CRASH_SECONDS = 120.0
GONE_SECONDS = 240.0


@pytest.fixture
def spec(chat: Kubernetes) -> Iterator[Json]:
    """The example's spec, for a test to change; afterwards the example is as it was."""
    found: Json = example()["spec"]
    yield found
    chat.replace(example()["spec"])
    wait_for_workers(chat, prefill=1, decode=1)


def condition(cluster: Kubernetes, kind: str) -> Json:
    """Condition of the example; empty when it is not there."""
    conditions = cluster.get(f"pdc/{NAME}").get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def test_old_worker_is_evicted_while_the_new_revision_crash_loops_and_is_given_up(
    chat: Kubernetes, spec: Json
) -> None:
    (old,) = {pod["metadata"]["labels"][REVISION] for pod in chat.pods(WORKERS)}
    crashes = {
        "name": "worker",
        "command": ["python", "-c", "raise SystemExit('of the test')"],
        "resources": {"requests": {"cpu": "10m"}},
    }
    spec["podTemplate"] = {"spec": {"containers": [crashes]}}
    spec["rollout"]["progressDeadlineSeconds"] = DEADLINE_SECONDS
    chat.replace(spec)
    wait_for(
        lambda: condition(chat, "Ready").get("reason") == "CrashLooping",
        CRASH_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )

    (decode,) = chat.pods(DECODE, f"{REVISION}={old}")
    chat.evict(decode["metadata"]["name"])

    def is_replaced() -> bool:
        found = ready(chat.pods(DECODE, f"{REVISION}={old}"))
        return [pod["metadata"]["uid"] for pod in found] not in ([], [decode["metadata"]["uid"]])

    wait_for(
        is_replaced,
        GONE_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )

    def is_given_up() -> bool:
        revisions = {pod["metadata"]["labels"][REVISION] for pod in chat.pods(WORKERS)}
        return condition(chat, "Stalled").get(
            "reason"
        ) == "ProgressDeadlineExceeded" and revisions == {old}

    wait_for(
        is_given_up,
        GONE_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )
    assert f"revision {old} goes on serving" in condition(chat, "Stalled")["message"]
    wait_for(
        lambda: "Paris" in chat.ask("ask", f"http://{NAME}:8000", "auto")[0]["text"],
        30.0,
        "an answer of the old workers",
    )
