"""A roll out by Recreate on real nodes, whose pods take their time to end."""

from collections.abc import Iterator

import pytest

from e2e.harness import (
    LOOK_SECONDS,
    NAME,
    READY_SECONDS,
    SELECTOR,
    Json,
    Kubernetes,
    example,
    wait_for_workers,
)
from tests.system.waiting import wait_for

REVISION = "pdcluster.io/revision"


@pytest.fixture
def recreated(chat: Kubernetes) -> Iterator[Json]:
    """The example's spec with Recreate, for a test to change; afterwards the example
    is as it was.
    """
    spec = example()["spec"]
    spec["rollout"]["strategy"] = "Recreate"
    chat.replace(spec)
    yield spec
    chat.replace(example()["spec"])
    wait_for_workers(chat, prefill=1, decode=1)


def test_recreate_makes_the_new_workers_when_the_last_old_one_has_ended(
    chat: Kubernetes, recreated: Json
) -> None:
    (old,) = {pod["metadata"]["labels"][REVISION] for pod in chat.pods("pdcluster.io/role")}
    recreated["engine"]["maxBatchedTokens"] = 128
    chat.replace(recreated)
    seen: set[frozenset[str]] = set()

    def is_done() -> bool:
        # those that are ending, too
        workers = chat.get("pods", f"--selector={SELECTOR},pdcluster.io/role")["items"]
        revisions = frozenset(pod["metadata"]["labels"][REVISION] for pod in workers)
        seen.add(revisions)
        return old not in revisions and chat.is_ready()

    wait_for(
        is_done, READY_SECONDS, lambda: chat.kubectl("get", "pods,pdc"), poll_seconds=LOOK_SECONDS
    )
    (new,) = {pod["metadata"]["labels"][REVISION] for pod in chat.pods("pdcluster.io/role")}
    assert seen >= {frozenset({old}), frozenset({new})}
    assert frozenset({old, new}) not in seen
    # The nodes see the new worker a moment after the status does.
    wait_for(
        lambda: "Paris" in chat.ask("ask", f"http://{NAME}:8000", "remote")[0]["text"],
        30.0,
        "an answer of the new workers",
    )
