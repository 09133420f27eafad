"""The autoscaler from real HTTP scrapes to StatefulSets: grows and shrinks, advises, and goes on
after a restart.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.apiserver.autoscaled_work import Work, scrape_each_second
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.fake_workers import FakeWorkers
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi

QUICK = {"mode": "On", "scaleDown": {"windowSeconds": 2, "maxStep": 0}}
ROLES = {
    "prefill": {"pools": [{"name": "cpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 3}]},
    "decode": {"pools": [{"name": "cpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 4}]},
}


@pytest.fixture
async def workers() -> AsyncIterator[FakeWorkers]:
    async with FakeWorkers() as found:
        yield found


@asynccontextmanager
async def at_work(
    plane: ControlPlane, namespace: str, workers: FakeWorkers, **autoscale: Any
) -> AsyncIterator[Work]:
    """A ready cluster with one worker of each role; its passes come as the test asks for them, and
    scrapes by themselves.
    """
    scene = Scene(PlainApi(plane.kubeconfig), namespace)
    scene.create(roles=ROLES, autoscale={**QUICK, **autoscale}, rollout={"drainTimeoutSeconds": 1})
    with Nodes(scene.api, namespace, workers.rule) as nodes:
        async with passes_over(plane.kubeconfig, namespace, worker_port=workers.port) as passes:
            scrape_each_second(passes)
            work = Work(scene, passes, workers, nodes)
            await work.until(lambda: scene.condition("Ready").get("status") == "True")
            yield work


async def test_a_steady_load_writes_nothing_more_grows_decode_and_its_end_shrinks_it(
    control_plane: ControlPlane, namespace: str, workers: FakeWorkers
) -> None:
    async with at_work(control_plane, namespace, workers) as work:
        await work.until(lambda: work.decided("decode") == 1)
        await work.rounds(2)
        at_rest = work.scene.versions()
        assert (await work.rounds(3), work.scene.versions()) == (0, at_rest)
        workers.load["decode"] = 2.2  # 0.75 each is the line: three workers
        await work.until(lambda: work.scene.replicas("decode") == 3)
        assert (
            work.decided("decode"),
            work.decided("prefill"),
            work.scene.replicas("prefill"),
        ) == (3, 1, 1)
        assert work.scaled("decode") == 3
        newest = work.decisions[0]
        assert {step["rule"] for step in newest["steps"]} >= {"need", "pool"}
        assert any(read["name"] == "kv_cache_usage_ratio" for read in newest["inputs"])
        assert any("decode/cpu" in message for message in work.events("Autoscaled"))

        workers.load["decode"] = 0.1
        await work.until(lambda: work.scene.replicas("decode") == 1)
        assert work.decided("decode") == 1
        await work.until(lambda: work.scene.condition("Ready").get("status") == "True")
        assert work.scene.condition("MetricsMissing") == {}


async def test_advise_writes_the_status_alone(
    control_plane: ControlPlane, namespace: str, workers: FakeWorkers
) -> None:
    async with at_work(control_plane, namespace, workers, mode="Advise") as work:
        workers.load["decode"] = 1.4
        await work.until(lambda: (work.decided("decode") or 0) >= 2)
        await work.rounds(2)
        assert work.scene.status["autoscaling"]["mode"] == "Advise"
        assert work.scene.replicas("decode") == 1
        assert work.scaled("decode") == 1
        assert any("is recommended" in message for message in work.events("Advised"))
        assert work.events("Autoscaled") == []

        work.scene.change(autoscale={"mode": "Off"})
        await work.until(lambda: "autoscaling" not in work.scene.status)


async def test_an_operator_that_starts_in_the_middle_goes_on_from_the_record(
    control_plane: ControlPlane, namespace: str, workers: FakeWorkers
) -> None:
    async with at_work(control_plane, namespace, workers) as work:
        scene = work.scene
        workers.load["decode"] = 2.2
        # one pass at a time: the one that decides only records
        while (work.decided("decode") or 0) < 2:
            await work.passes.loop.fill()
            await work.passes.one()
            await asyncio.sleep(0.1)
        recorded = work.decided("decode")
        assert scene.replicas("decode") == 1
        # has seen no metrics
        async with passes_over(
            control_plane.kubeconfig, namespace, worker_port=workers.port
        ) as passes:
            await passes.until_written()
            assert scene.replicas("decode") == recorded
            assert work.decided("decode") == recorded


async def test_a_scale_by_hand_does_not_count_and_is_reported(
    control_plane: ControlPlane, namespace: str, workers: FakeWorkers
) -> None:
    async with at_work(control_plane, namespace, workers) as work:
        await work.until(lambda: work.decided("decode") == 1)
        control_plane.kubectl(
            "scale", "--namespace", namespace, "pdps/chat-decode-cpu", "--replicas=3"
        )
        await work.until(lambda: work.events("ScalersOverridden"))
        assert work.scaled("decode") == 1
        assert work.scene.replicas("decode") == 1
        (message,) = work.events("ScalersOverridden")
        assert message.startswith(
            "decode/cpu: kubectl asked for 3 workers; the autoscaler alone decides, and keeps 1"
        )


async def test_a_tail_over_its_objective_grows_prefill_while_the_mean_holds(
    control_plane: ControlPlane, namespace: str, workers: FakeWorkers
) -> None:
    objective = {"ttft": {"percentile": 90, "seconds": 0.5}}
    async with at_work(control_plane, namespace, workers, objective=objective) as work:

        def grown() -> bool:
            """Look after more first tokens, of which 6 in 40 are late: their mean is 0.16 s."""
            for seconds in [0.06] * 34 + [0.75] * 6:
                workers.pages.metrics.time_to_first_token_seconds.observe(seconds)
            return work.scene.replicas("prefill") == 2

        await work.until(grown)

        (newest,) = (each for each in work.decisions if each["replicas"][0]["replicas"] == 2)
        read = {each["name"]: each for each in newest["inputs"] if each["subject"] == "prefill"}
        late = read["time_to_first_token_seconds_p90"]
        assert late["value"] > 0.5 == late["limit"]
        assert read["time_to_first_token_seconds_p50"]["value"] < 0.1
        assert read["time_to_first_token_seconds_samples"]["value"] >= 50
        assert any("seconds_p90" in step["why"] for step in newest["steps"])
        assert work.decided("decode") == 1
