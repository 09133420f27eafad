"""The largest object that is not refused: the operator's memory for it, and how long it holds the
loop.
"""

import asyncio
import gc
import json
import sys
import time
from asyncio import events
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcluster_operator.informer.cache import MAX_BYTES
from pdcluster_schema.load import parse
from pdcluster_schema.sections import MAX_POOLS
from pdcluster_schema.values import MAX_SPEC_BYTES, MAX_TEMPLATE, MAX_TEMPLATE_BYTES
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, SPEC, Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

MOST_BYTES = 256 * 2**20
"""Half of the limit of the operator's pod."""

MOST_SECONDS = 0.5
POOLS = {"prefill": 6, "decode": 6, "router": 4}


def largest(make: Callable[[int], Body], most: int) -> Body:
    """The largest of a series that has so many bytes as JSON."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size_of(make(middle)) <= most else (low, middle)
    return make(low)


def size_of(value: Body) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def variables(number: int) -> Body:
    env = [{"name": f"A{each}", "value": ""} for each in range(number)]
    return {"spec": {"containers": [{"name": "worker", "env": env}]}}


def of_templates(make: Callable[[int], Body]) -> Body:
    """Sections of a spec: a template for each role, and what is left for that of all."""
    roles: Body = {
        role: {
            "pools": [{"name": f"p{number}", "replicas": 0} for number in range(pools)],
            "podTemplate": largest(make, MAX_TEMPLATE_BYTES),
        }
        for role, pools in POOLS.items()
    }
    left = MAX_SPEC_BYTES - size_of({**SPEC, "roles": roles}) - 1000
    return {"roles": roles, "podTemplate": largest(make, min(left, MAX_TEMPLATE_BYTES))}


def of_texts() -> Body:
    """As many characters as a chat template may have, which have to be escaped in YAML."""
    roles: Body = of_templates(lambda number: {"metadata": {}})["roles"]
    model = {**SPEC["model"], "chatTemplate": "{{ messages }}\n" * (MAX_TEMPLATE // 15)}
    left = MAX_SPEC_BYTES - size_of({"model": model, "roles": roles}) - 1000
    template = largest(variables, min(left, MAX_TEMPLATE_BYTES))
    return {"model": model, "roles": roles, "podTemplate": template}


CASES = {
    "variables": of_templates(variables),
    "texts": of_texts(),
}


class Stretches:
    """The longest stretch in which a loop ran one callback, in seconds of the processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest, run = 0.0, events.Handle._run

        def timed(handle: events.Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - began)

        monkeypatch.setattr(events.Handle, "_run", timed)


@pytest.fixture
def only_own_garbage() -> Iterator[None]:
    """The collector does not walk what earlier tests left in this process, which an operator
    does not have: that alone can take longer than all the work of a pass.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Scene:
    return Scene(PlainApi(control_plane.kubeconfig), namespace)


@pytest.mark.usefixtures("only_own_garbage")
@pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())
async def test_the_largest_object_holds_the_loop_for_no_long_stretch(
    control_plane: ControlPlane,
    scene: Scene,
    sections: Body,
    monkeypatch: pytest.MonkeyPatch,
):
    assert sum(POOLS.values()) == MAX_POOLS
    assert parse(scene.create(**sections)).spec
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        seen = Stretches(monkeypatch)
        await asyncio.create_task(passes.until_written())
        assert len(scene.children("StatefulSet")) == MAX_POOLS
        assert passes.loop.cache.num_bytes(passes.key) < MAX_BYTES / 2  # of one revision
        first, seen.longest = seen.longest, 0.0
        passes.session.fingerprint = None  # all is compared again
        done = await asyncio.create_task(passes.one())
        assert not done.wrote
        assert max(first, seen.longest) < MOST_SECONDS


def of_levels(number: int) -> Body:
    """Sections of a spec that the API server takes, which takes 10,000 levels, each of them in a
    time that grows with their number.
    """
    value: Any = "end"
    for _ in range(number):
        value = {"a": value}
    return {"podTemplate": {"spec": value}}


def test_an_object_of_very_many_levels_is_refused_and_stops_no_other(
    control_plane: ControlPlane, scene: Scene, tmp_path: Path
):
    deep, later = (Scene(scene.api, scene.namespace, name) for name in ("deep", "later"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(40_000)  # of this test's own JSON
    try:
        with OperatorProcess(
            tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=scene.namespace
        ) as operator:
            scene.create()
            deep.create(**of_levels(4000))
            message = deep.await_condition("Ready", "False", "InvalidSpec")["message"]
            assert "has more than 100 levels" in message
            operator.kill()
            operator.start()  # which lists it
            later.create()
            later.await_condition("Ready", "False")
            assert operator.stop() == 0
    finally:
        deep.delete()
        sys.setrecursionlimit(limit)


def most_resident(pid: int) -> int:
    """Bytes of memory that a process has had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_the_largest_object_and_its_successor_leave_memory_for_others(
    control_plane: ControlPlane, scene: Scene, tmp_path: Path
):
    with OperatorProcess(
        tmp_path, control_plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=scene.namespace
    ) as operator:
        scene.create(**CASES["variables"])
        for model in ({}, {"model": {"dtype": "float32"}}):  # which is another revision
            scene.change(**model)
            wait_for(
                lambda: (
                    scene.status.get("observedGeneration") == scene.body["metadata"]["generation"]
                ),
                3 * DEADLINE_SECONDS,  # hundreds of objects
                lambda: operator.log_end,
            )
            operator.await_resyncs(2)
        assert most_resident(operator.pid) < MOST_BYTES
