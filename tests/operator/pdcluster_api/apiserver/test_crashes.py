"""Crashes of a container that count, by the times in its pod's body: long ago, now and again."""

from typing import Any

import pytest

from pdcluster_api.apiserver.pods import pod_problem
from pdcluster_schema import conditions as words
from pdcluster_schema.labels import workload_labels


def at(hour: int, minute: int = 0, second: int = 0) -> str:
    return f"2026-01-02T{hour:02}:{minute:02}:{second:02}Z"


def unready(since: str, restarts: int, *, code: int = 1, waiting: str = "", **run: str) -> Any:
    """A pod that became unready then, whose engine ended before.  run: times of its last run."""
    now: Any = {"running": {"startedAt": run.get("finishedAt")}}
    engine = {
        "name": "engine",
        "ready": True,
        "restartCount": restarts,
        "state": {"waiting": {"reason": waiting}} if waiting else now,
        "lastState": {"terminated": {"exitCode": code, "reason": "Error", **run}},
    }
    return {
        "metadata": {"name": "p", "labels": workload_labels("chat", "decode", "cpu", "aaaa")},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}],
            "initContainerStatuses": [engine],
            "containerStatuses": [{"name": "worker", "ready": False, "state": now}],
        },
    }


def reason(pod: Any) -> str | None:
    problem = pod_problem(pod)
    return problem and problem.reason


OVER = [
    (
        "two crashes, then ready for hours",
        unready(at(9), 2, startedAt=at(2), finishedAt=at(2, 1)),
    ),
    (
        "a command line that was refused once, then ready for hours",
        unready(at(9), 1, code=2, startedAt=at(2), finishedAt=at(2, 1)),
    ),
    (
        "two crashes long ago, and one now that ends hours of service",
        unready(at(9), 3, startedAt=at(2), finishedAt=at(8, 59, 58)),
    ),
]


@pytest.mark.parametrize("pod", [case[1] for case in OVER], ids=[case[0] for case in OVER])
def test_crashes_before_the_pod_was_last_ready_are_over(pod: Any) -> None:
    assert reason(pod) is None


COUNTING = [
    (
        "unready since before the last run",
        unready(at(2), 2, startedAt=at(2, 1), finishedAt=at(2, 3)),
    ),
    (
        "unready since its first start, which takes long",
        unready(at(2), 2, startedAt=at(2, 20), finishedAt=at(2, 40)),
    ),
    (
        "ready for a minute between two crashes",
        unready(at(9, 2, 3), 2, startedAt=at(9), finishedAt=at(9, 2)),
    ),
    (
        "Kubernetes waits before it starts it again",
        unready(at(9), 2, waiting="CrashLoopBackOff", startedAt=at(2), finishedAt=at(2, 1)),
    ),
    ("without times", unready(at(9), 2)),
    ("with a time that is none", unready(at(9), 2, startedAt="today", finishedAt="now")),
]


@pytest.mark.parametrize("pod", [case[1] for case in COUNTING], ids=[case[0] for case in COUNTING])
def test_crashes_of_this_spell_count(pod: Any) -> None:
    assert reason(pod) == words.CRASH_LOOPING
