"""A node that loses its power under load: its worker comes again on the other one within minutes,
the object says meanwhile which node is lost, and no stream is.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.client_program import Stories
from e2e.harness import (
    LOOK_SECONDS,
    NAME,
    Json,
    Kubernetes,
    example,
    ready,
    wait_for_workers,
)
from e2e.rig import cluster as rig
from e2e.rig import removal
from e2e.rig.components import FIRST, SECOND
from e2e.streams import cut, streams
from tests.system.waiting import wait_for

BACK_SECONDS = 180.0
END_SECONDS = 120.0
STORIES = Stories(
    count=100_000, clients=3, max_tokens=40, words=60, seconds=BACK_SECONDS, pause=0.5
)
SIZES = {"prefill": 1, "router": 1}


@pytest.fixture
def two_nodes(operator: Kubernetes) -> Iterator[Kubernetes]:
    """The example behind a router with `deleteLostPods`, and of its two decode workers one alone
    on a second node; afterwards one node and the example as it was.
    """
    if operator.rig is None:
        pytest.skip("gives the rig a second node, which no other cluster can be given")
    operator.install_operator("--set=deleteLostPods=true")
    spec = example()["spec"]
    spec["roles"]["router"] = {"pools": [{"name": "cpu", "replicas": 1}]}
    operator.kubectl("apply", "--filename=-", stdin=json.dumps({**example(), "spec": spec}))
    operator.start_client()
    wait_for_workers(operator, decode=1, **SIZES)
    try:
        rig.add_node(operator.rig)
        operator.kubectl("cordon", FIRST.name)
        operator.scale(decode=2)
        wait_for_workers(operator, decode=2, **SIZES)
        operator.kubectl("uncordon", FIRST.name)
        yield operator
    finally:
        operator.kubectl("uncordon", FIRST.name)
        removal.down(operator.rig.second)
        operator.kubectl("delete", f"node/{SECOND.name}", "--ignore-not-found")
        operator.scale(decode=1)
        operator.replace(example()["spec"])
        operator.install_operator()
        wait_for_workers(operator, prefill=1, decode=1)


def decode_nodes(cluster: Kubernetes) -> list[str]:
    """The node of each decode worker that is ready."""
    return sorted(
        pod["spec"]["nodeName"] for pod in ready(cluster.pods("pdcluster.io/role=decode"))
    )


def conditions_of(cluster: Kubernetes, reason: str) -> list[Json]:
    """The conditions with this reason."""
    conditions: list[Json] = cluster.get(f"pdc/{NAME}")["status"]["conditions"]
    return [each for each in conditions if each["reason"] == reason]


@pytest.mark.long
def test_a_worker_of_a_lost_node_comes_again_on_another_and_streams_go_on(
    two_nodes: Kubernetes, note: Callable[[str], None]
) -> None:
    assert two_nodes.rig is not None
    assert decode_nodes(two_nodes) == [FIRST.name, SECOND.name]
    with streams(two_nodes, STORIES) as running:
        running.wait_begun(STORIES.clients, END_SECONDS)
        begin = time.monotonic()
        removal.lose_second(two_nodes.rig)

        def within(is_so: Callable[[], object]) -> float:
            left = BACK_SECONDS - (time.monotonic() - begin)
            wait_for(
                is_so,
                left,
                lambda: two_nodes.kubectl("get", "pods,pdc,nodes", "--output=wide"),
                poll_seconds=LOOK_SECONDS,
            )
            return time.monotonic() - begin

        seen = within(lambda: conditions_of(two_nodes, "NodeLost"))
        lost = conditions_of(two_nodes, "NodeLost")
        back = within(lambda: decode_nodes(two_nodes) == [FIRST.name, FIRST.name])
        answers = running.wait_ended(BACK_SECONDS + END_SECONDS)

    note(f"NodeLost after {seen:.0f} s, back after {back:.0f} s, {len(answers)} streams")
    assert "DecodeReady" in {each["type"] for each in lost}
    assert all(f"on node {SECOND.name} has not ended" in each["message"] for each in lost), lost
    assert cut(answers, STORIES) == []
