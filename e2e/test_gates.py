"""A revision that is slow by a delay of its KV goes back under load, by the latencies of both; one
whose KV arrives damaged goes back by the verification of its transfers.
"""

import json
from collections.abc import Iterator

import pytest

from e2e.client_program import Stories
from e2e.harness import (
    LOOK_SECONDS,
    NAME,
    READY_SECONDS,
    Json,
    Kubernetes,
    example,
    wait_for_workers,
)
from e2e.streams import cut, streams
from tests.system.waiting import wait_for

REVISION = "pdcluster.io/revision"
SLOW = 4_000_000  # bytes per second: KV of a prompt of LOAD is on its way for seconds
# Prompts that are prefilled remotely where there is a worker for it: the second token waits for KV.
LOAD = Stories(count=1000, clients=3, max_tokens=2, words=600, seconds=150, first=12_000)

DAMAGE = """
import socket

ordinary = socket.socket.recv_into

def recv_into(self, *arguments):
    num_bytes = ordinary(self, *arguments)
    if num_bytes > 4096:  # KV, not what announces it
        memoryview(arguments[0])[num_bytes - 1] ^= 1
    return num_bytes

socket.socket.recv_into = recv_into
"""
"""Flips a bit of the KV that a worker receives: what Python imports at its start, under a name of
its own.
"""


@pytest.fixture
def gated(chat: Kubernetes) -> Iterator[Json]:
    """The example's spec with gates, for a test to change; afterwards the example is as it was."""
    spec = example()["spec"]
    spec["rollout"] |= {
        "strategy": "Rolling",
        "onFailure": "Rollback",
        "bakeSeconds": 20,
        "minRequests": 20,
    }
    # neither revision holds it on two cores: the slow one is worse
    spec["autoscale"] = {
        "mode": "Advise",
        "objective": {"itl": {"percentile": 50, "seconds": 0.02}},
    }
    chat.replace(spec)
    wait_for_workers(chat, prefill=1, decode=1)
    yield spec
    chat.replace(example()["spec"])
    wait_for_workers(chat, prefill=1, decode=1)


def rolled_back(cluster: Kubernetes) -> str:
    """The message of the condition; empty while it is not there."""
    found = cluster.get(f"pdc/{NAME}").get("status", {}).get("conditions", [])
    return next((each["message"] for each in found if each["type"] == "RolledBack"), "")


def revisions(cluster: Kubernetes) -> set[str]:
    return {pod["metadata"]["labels"][REVISION] for pod in cluster.pods("pdcluster.io/role")}


@pytest.mark.long
def test_a_slow_revision_is_rolled_back_by_its_latencies(chat: Kubernetes, gated: Json) -> None:
    (old,) = revisions(chat)
    gated["engine"]["transferBandwidth"] = SLOW
    with streams(chat, LOAD) as running:
        running.wait_begun(LOAD.clients, READY_SECONDS)
        chat.replace(gated)
        message = wait_for(
            lambda: rolled_back(chat),
            READY_SECONDS,
            lambda: chat.kubectl("get", f"pdc/{NAME}", "--output=yaml"),
            poll_seconds=LOOK_SECONDS,
        )
        answers = running.wait_ended(READY_SECONDS)

    assert f"was rolled back to {old}: inter_token_latency_seconds_p50 is " in message
    assert "of the old one in the same time; autoscale.objective is 0.02 s" in message
    assert cut(answers, LOAD) == []
    wait_for(
        lambda: revisions(chat) == {old},
        READY_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )
    assert chat.get(f"pdc/{NAME}")["spec"]["engine"]["transferBandwidth"] == SLOW


@pytest.fixture
def damaging(chat: Kubernetes) -> Iterator[Json]:
    """The podTemplate of workers that damage what they receive."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "damage"},
        "data": {"sitecustomize.py": DAMAGE},
    }
    chat.kubectl("apply", "--filename=-", stdin=json.dumps(body))
    container = {
        "name": "worker",
        "env": [{"name": "PYTHONPATH", "value": "/damage:/opt/app"}],
        "volumeMounts": [{"name": "damage", "mountPath": "/damage"}],
    }
    volume = {"name": "damage", "configMap": {"name": "damage"}}
    yield {"spec": {"containers": [container], "volumes": [volume]}}
    chat.kubectl("delete", "configmap/damage")


@pytest.mark.long
def test_a_revision_whose_kv_is_damaged_is_rolled_back_by_its_verification(
    chat: Kubernetes, damaging: Json, gated: Json
) -> None:
    (old,) = revisions(chat)
    gated["roles"]["decode"]["podTemplate"] = damaging
    chat.replace(gated)
    message = wait_for(
        lambda: rolled_back(chat),
        2 * READY_SECONDS,  # a transfer that failed is verified again before it counts
        lambda: chat.kubectl("get", f"pdc/{NAME}", "--output=yaml"),
        poll_seconds=LOOK_SECONDS,
    )

    assert f"was rolled back to {old}: KVTransferVerified" in message
    assert "is not the sender's" in message
    (answer,) = chat.ask("ask", f"http://{NAME}:8000", "remote")
    assert (answer["status"], "Paris" in answer["text"]) == (200, True), answer
    wait_for(
        lambda: revisions(chat) == {old},
        READY_SECONDS,
        lambda: chat.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )
