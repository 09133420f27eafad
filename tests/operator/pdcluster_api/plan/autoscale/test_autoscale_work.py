"""One object's numbers do not decide what a pass costs: the greatest sizes take about as many steps
and as little memory as small ones.
"""

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import Clock, Memory, PoolFacts, WorkerSample
from pdcluster_api.plan.cluster import requested_sizes
from pdcluster_api.plan.observed.state import ScalerState
from pdcluster_api.plan.sizes import ScrapeState, pool_facts, pool_sizes
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.values import MAX_REPLICAS, MAX_WORKERS
from pdctl.preview.preview import preview, steady_state
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOON,
    NOW,
    make_spec,
    pool,
    windows_of,
)
from tests.operator.pdcluster_api.plan.clusters import NOW as TODAY
from tests.operator.pdcluster_api.plan.clusters import make_cluster, plan_all, running

MAX_STEPS = 360_000
"""Calls of one decision over twelve pools with a band, a total and limits by type, all of which are
searched; the dearest that was found takes 293,347.
"""

MAX_BYTES = 1 << 20
BUSY = replace(
    CALM,
    kv_cache_usage_ratio=0.99,
    engine_busy_ratio=0.99,
    num_requests_waiting=1e6,
    prefill_queue_requests=1e6,
)


def num_steps(act: Callable[[], Any]) -> int:
    """Calls, of Python and of C."""
    count = 0

    def step(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(step)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def peak_bytes(act: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SIZES = st.sampled_from([0, 1, 700, MAX_REPLICAS])
LIMITS = st.sampled_from([1, 9, 1000, MAX_WORKERS])


@st.composite
def greatest(draw: st.DrawFn) -> tuple[PDClusterSpec, list[PoolFacts], dict[str, WorkerSample]]:
    """A spec of great numbers, facts with few pods that ask for many, and what the few say."""
    names = [f"p{number}" for number in range(draw(st.integers(1, 6)))]
    roles = {
        role: [pool(0, name, gpu=draw(st.sampled_from(["H100", "cpu"]))) for name in names]
        for role in ("prefill", "decode")
    }
    lines: dict[str, Any] = {
        "scaleDown": {"windowSeconds": 0, "maxStep": 0},
        "scaleUp": {"maxStep": 0},
    }
    limits = draw(
        st.fixed_dictionaries(
            {}, optional={"total": LIMITS, "perGpu": st.fixed_dictionaries({"H100": LIMITS})}
        )
    )
    bounds = {
        "name": "now",
        "role": "decode",
        "pool": "p0",
        "start": "00:00",
        "end": "00:00",
        "minReplicas": draw(SIZES),
    }
    band = draw(st.sampled_from([{}, {"min": 0.618, "max": 0.618}, {"min": 1e-6}, {"max": 1000.0}]))
    spec = make_spec(
        prefill=roles["prefill"],
        decode=roles["decode"],
        ratio=band,
        budget=limits,
        schedules=[bounds],
        lines=lines,
    )
    facts = []
    for role in roles:
        for each in roles[role]:
            replicas, ready = draw(SIZES), draw(st.integers(0, 2))
            ready = min(ready, replicas)
            asked = {
                "current": ready,
                "ready": ready,
                "top": replicas,
                "unready_top": replicas - ready,
            }
            facts.append(PoolFacts(role, each["name"], each["gpu"], replicas, **asked))
    workers = {role: draw(st.sampled_from([IDLE, CALM, BUSY])) for role in roles}
    return spec, facts, workers


@settings(max_examples=60, deadline=None)
@given(world=greatest())
def test_a_decision_costs_little_at_the_maximum(
    world: tuple[PDClusterSpec, list[PoolFacts], dict[str, WorkerSample]],
) -> None:
    spec, facts, workers = world
    windows = windows_of(facts, **workers)

    def act() -> None:
        found = decide(spec, facts, windows, Memory(), Clock(NOW, NOON)).decision.replicas
        assert all(size <= MAX_REPLICAS for size in found.values())

    assert num_steps(act) < MAX_STEPS
    assert peak_bytes(act) < MAX_BYTES


def test_a_decision_never_asks_for_more_than_an_object_may_have() -> None:
    pools = [pool(900, f"p{number}") for number in range(4)]
    spec = make_spec(prefill=[pool(400)], decode=pools, scaleUp={"maxStep": 0})
    facts = [
        PoolFacts(role, each["name"], "H100", each["replicas"], each["replicas"], each["replicas"])
        for role, found in (("prefill", [pool(400)]), ("decode", pools))
        for each in found
    ]
    outcome = decide(spec, facts, windows_of(facts, decode=BUSY), Memory(), Clock(NOW, NOON))

    assert sum(outcome.decision.replicas.values()) == MAX_WORKERS


def asking(number: int) -> list[ScalerState]:
    return [ScalerState("prefill", "cpu", number, 1), ScalerState("decode", "cpu", number, 2)]


def passes() -> Sequence[tuple[str, Callable[[int], Any]]]:
    cluster = make_cluster()
    advised = cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"autoscale": AutoscaleSpec(mode="Advise")})}
    )

    def facts(number: int) -> Any:
        observed = running(advised, scalers=asking(number))
        return pool_facts(requested_sizes(advised, observed), observed, ScrapeState())

    return (
        (
            "plan",
            lambda number: plan_all(cluster, running(cluster, scalers=asking(number)), TODAY),
        ),
        ("facts", facts),
        ("sizes", lambda number: pool_sizes(cluster.spec, asking(number), {})),
        (
            "preview",
            lambda number: preview(
                cluster, cluster, replace(steady_state(cluster), scalers=asking(number)), TODAY
            ),
        ),
    )


@pytest.mark.parametrize(("name", "act"), passes(), ids=[name for name, _ in passes()])
def test_a_pass_costs_the_same_however_many_workers_are_requested(
    name: str, act: Callable[[int], Any]
) -> None:
    act(8)  # what is made once is made
    small = num_steps(lambda: act(8))

    assert num_steps(lambda: act(MAX_REPLICAS)) < 1.2 * small
    assert num_steps(lambda: act(2**31 - 1)) < 1.2 * small
    assert peak_bytes(lambda: act(2**31 - 1)) < peak_bytes(lambda: act(8)) + (64 << 10)
