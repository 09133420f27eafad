"""Pools that go to zero and come back: by the autoscaler, from real HTTP scrapes of routers, and by
`/scale`.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.apiserver.autoscaled_work import Work, scrape_each_second
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.fake_workers import FakeWorkers
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi

POOL = {"name": "cpu", "replicas": 1, "minReplicas": 0, "maxReplicas": 3}
ROLES = {
    "router": {"pools": [{"name": "cpu", "replicas": 1}]},
    "prefill": {"pools": [POOL]},
    "decode": {"pools": [POOL]},
}
ON = {"mode": "On", "scaleDown": {"windowSeconds": 2}}


@pytest.fixture
async def work(control_plane: ControlPlane, namespace: str) -> AsyncIterator[Work]:
    """A cluster with routers and one worker of each role, without autoscaling and any request."""
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create(
        roles=ROLES,
        qos={"admission": {"workerWaitSeconds": 60}},
        rollout={"drainTimeoutSeconds": 1},
    )
    async with FakeWorkers() as workers:
        workers.load = dict.fromkeys(workers.load, 0.0)
        with Nodes(scene.api, namespace, workers.rule) as nodes:
            async with passes_over(
                control_plane.kubeconfig, namespace, worker_port=workers.port
            ) as passes:
                scrape_each_second(passes)
                found = Work(scene, passes, workers, nodes)
                await found.until(lambda: is_ready(found, "AsDeclared"))
                yield found


def is_ready(work: Work, reason: str) -> bool:
    ready = work.scene.condition("Ready")
    is_new = ready.get("observedGeneration") == work.scene.body["metadata"]["generation"]
    return is_new and (ready["status"], ready["reason"]) == ("True", reason)


def sizes(work: Work) -> tuple[int | None, int | None]:
    return work.scene.replicas("prefill"), work.scene.replicas("decode")


async def test_all_pools_sleep_without_requests_a_roll_out_lets_them_and_a_held_request_wakes_them(
    work: Work,
) -> None:
    work.scene.change(autoscale=ON)
    await work.until(lambda: work.scene.condition("Serving").get("reason") == "ScaledToZero")
    assert (is_ready(work, "ScaledToZero"), *sizes(work)) == (True, 0, 0)
    assert (work.scaled("prefill"), work.scaled("decode")) == (0, 0)
    serving = work.scene.condition("Serving")
    assert (serving["status"], serving["message"]) == (
        "False",
        "all workers sleep: routers hold requests for 60 s at most, and one that they hold wakes "
        "the first workers",
    )
    assert work.scene.status["router"] == "1/1"

    work.scene.change(engine={"blockSize": 32})
    await work.until(lambda: is_ready(work, "ScaledToZero") and sizes(work) == (0, 0))
    at_rest = work.scene.versions()
    for _ in range(30):
        await work.look()
        await asyncio.sleep(0.1)
    assert work.scene.versions() == at_rest

    work.workers.held = 2
    await work.until(lambda: is_ready(work, "AsDeclared") and sizes(work) == (1, 1))
    (woken,) = (
        each for each in work.decisions if "wake" in {step["rule"] for step in each["steps"]}
    )
    assert {step["why"] for step in woken["steps"] if step["rule"] == "wake"} == {
        "routers hold 2 requests"
    }
    assert work.scene.condition("Serving")["status"] == "True"


async def test_a_scale_to_zero_and_back_is_as_declared(
    work: Work, control_plane: ControlPlane, namespace: str
) -> None:
    for number, reason in ((0, "ScaledToZero"), (1, "AsDeclared")):
        for role in ("prefill", "decode"):
            control_plane.kubectl(
                *("scale", "--namespace", namespace, f"pdps/chat-{role}-cpu"),
                f"--replicas={number}",
            )
        await work.until(
            lambda number=number, reason=reason: (
                is_ready(work, reason) and sizes(work) == (number, number)
            )
        )
