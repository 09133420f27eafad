"""A roll out in a simulated cluster, by each strategy, with an autoscaler and without."""

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from pdcluster_api.traces.loads import LoadInterval, drawn_requests
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.rollout import Strategy
from pdcluster_simulator.rollout import RolloutFigures
from pdcluster_simulator.run import Result
from tests.simulator.small_clusters import TimedRequest, make_cluster, make_trace, run

ROLES = {"prefill": 2, "decode": 4}
REMOTE = {"offload": {"prefillLengthThreshold": 8}}
STRATEGIES = get_args(Strategy)
START_SECONDS, BEGIN = 30.0, 60.0


def load(begin: float = 0.0, end: float = 600.0, rate: float = 4.0) -> list[TimedRequest]:
    return [(begin + each / rate, 40, 20) for each in range(int((end - begin) * rate))]


LOAD = load()


def rolled(
    strategy: str,
    roles: dict[str, int] = ROLES,
    requests: Sequence[TimedRequest] = LOAD,
    **sections: Any,
) -> Result:
    rollout = {"strategy": strategy, **sections.pop("rollout", {})}
    cluster = make_cluster(roles, routing=REMOTE, rollout=rollout, **sections)
    return run(
        make_trace(*requests),
        cluster,
        autoscales=cluster.spec.autoscale.mode == "On",
        start_seconds=START_SECONDS,
        rollout_at=BEGIN,
    )


def figures(result: Result) -> RolloutFigures:
    assert result.rollout is not None
    return result.rollout


def test_rolling_fails_no_request_and_takes_one_worker_more():
    result = rolled("Rolling", autoscale={"budget": {"total": 7}})
    found = figures(result)
    assert result.recorder.outcomes == {"complete": len(LOAD)}
    assert found.least_ready == ROLES
    assert found.most_accelerators == {"H100": 7}
    assert found.out_of_band == 0
    # six workers one after the other
    assert found.seconds is not None
    assert 6 * START_SECONDS <= found.seconds < 12 * START_SECONDS


def test_blue_green_takes_all_twice_and_recreate_ends_the_service():
    blue_green, recreate = rolled("BlueGreen"), rolled("Recreate")
    found = figures(blue_green)
    assert blue_green.recorder.outcomes == {"complete": len(LOAD)}
    assert found.least_ready == ROLES
    assert found.most_accelerators == {"H100": 12}
    found = figures(recreate)
    assert recreate.recorder.outcomes["refused"] > 0
    assert recreate.recorder.refusals.keys() == {"no_worker"}
    assert found.least_ready == dict.fromkeys(ROLES, 0)
    assert found.most_accelerators == {"H100": 6}


def test_a_budget_without_room_needs_a_worker_to_be_missing():
    tight: dict[str, Any] = {"autoscale": {"budget": {"total": 6}}}
    stuck = figures(rolled("Rolling", **tight))
    assert stuck.seconds is None
    found = rolled("Rolling", rollout={"maxUnavailable": 1}, **tight)
    assert found.recorder.outcomes == {"complete": len(LOAD)}
    assert figures(found).seconds is not None
    assert figures(found).most_accelerators == {"H100": 6}


def in_pools(strategy: str, pools: dict[str, Any], **sections: Any) -> PDCluster:
    """pools: by role"""
    document = make_cluster(rollout={"strategy": strategy}, **sections).model_dump(
        by_alias=True, mode="json", exclude_unset=True
    )
    document["spec"]["roles"] = {role: {"pools": each} for role, each in pools.items()}
    return parse(document)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pool_without_workers_holds_nothing_up(strategy: Strategy):
    empty = {"name": "y", "gpu": "H100", "replicas": 0}
    one = {"name": "x", "gpu": "H100", "replicas": 1}
    cluster = in_pools(strategy, {"prefill": [one], "decode": [one, empty]})
    result = run(make_trace(*LOAD), cluster, start_seconds=START_SECONDS, rollout_at=BEGIN)
    assert figures(result).seconds is not None


@pytest.mark.parametrize(("strategy", "decodes"), [("BlueGreen", 3), ("Rolling", 2)])
def test_workers_that_serve_the_other_role_go_back_where_they_roll(strategy: str, decodes: int):
    bounds = {"name": "x", "gpu": "H100", "minReplicas": 1, "maxReplicas": 6, "flexible": True}
    pools = {"prefill": [{**bounds, "replicas": 4}], "decode": [{**bounds, "replicas": 2}]}
    autoscale = {
        "mode": "On",
        "budget": {"total": 6},
        "scaleDown": {"windowSeconds": 3600},
        "decode": {"kvUsageUp": 0.05, "kvUsageDown": 0.01},
    }
    cluster = in_pools(strategy, pools, routing=REMOTE, autoscale=autoscale)
    requests = load(rate=6.0)
    result = run(
        make_trace(*requests),
        cluster,
        autoscales=True,
        start_seconds=START_SECONDS,
        rollout_at=200.0,
    )
    ready = {sample.seconds: sample.ready["decode/x"] for sample in result.recorder.samples}
    assert (ready[195.0], ready[215.0]) == (3, decodes)
    assert result.recorder.outcomes == {"complete": len(requests)}


def test_blue_green_keeps_old_workers_that_are_too_many_until_it_switches():
    autoscale = {"mode": "On", "scaleDown": {"windowSeconds": 65}}
    result = rolled("BlueGreen", requests=load(rate=0.2), autoscale=autoscale)
    samples = {each.seconds: each for each in result.recorder.samples}
    shrinks = next(each for each in result.decisions if each.record is not None)
    assert BEGIN < shrinks.seconds < BEGIN + START_SECONDS
    assert samples[shrinks.seconds + 5.0].ready["decode/x"] == 4
    assert samples[shrinks.seconds + 5.0].replicas["decode/x"] == 4 + 3
    assert figures(result).seconds is not None


def test_the_autoscaler_goes_on_in_a_roll_out():
    busy = {"mode": "On", "decode": {"kvUsageUp": 0.05, "kvUsageDown": 0.01}}
    requests = [*load(0.0, BEGIN + 10.0, 0.1), *load(BEGIN + 10.0, 600.0)]
    result = rolled("Rolling", {"prefill": 1, "decode": 1}, requests, autoscale=busy)
    found = figures(result)
    assert result.recorder.outcomes == {"complete": len(requests)}
    assert found.seconds is not None
    grew = [each.seconds for each in result.decisions if each.record is not None]
    assert any(found.began < at < found.began + found.seconds for at in grew)
    assert result.recorder.samples[-1].ready["decode/x"] > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steady_load_is_repeated_before_and_after_it(strategy: Strategy):
    loads = drawn_requests([LoadInterval(0.0, 1.0, 40, 20, end=3600.0)], "0")
    cluster = make_cluster(
        ROLES, routing=REMOTE, rollout={"strategy": strategy}, autoscale={"mode": "On"}
    )
    result = run(
        loads,
        cluster,
        autoscales=True,
        repeats=True,
        start_seconds=START_SECONDS,
        rollout_at=1800.0,
    )
    found = figures(result)
    assert 1800.0 <= found.began <= 1805.0
    assert found.seconds is not None
    assert result.recorder.repeated > 1800.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_roll_out_repeats_with_its_seed(strategy: str):
    first, again = rolled(strategy), rolled(strategy)
    assert first.recorder.ttft == again.recorder.ttft
    assert figures(first) == figures(again)
