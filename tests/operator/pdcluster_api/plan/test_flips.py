"""A flipped worker counts for the role that it serves: commands, numbers, conditions, facts."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.cluster import (
    accelerators_of_pools,
    desired_state,
    requested_sizes,
    serving_replicas,
)
from pdcluster_api.plan.drain.draining import DRAIN_POLL_SECONDS
from pdcluster_api.plan.flips import as_served, requested_flips
from pdcluster_api.plan.observed.state import (
    Flipped,
    Observed,
    ScalerState,
    ScalingDecision,
    WorkerDisaggregation,
    WorkerRecords,
)
from pdcluster_api.plan.sizes import ScrapeState, pool_facts
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    NOW,
    Planned,
    condition_of,
    identity,
    plan_all,
    workload,
)
from tests.operator.pods import pod_states
from tests.schema.object_cases import Change, at, both, minimal, no_change

P, D = ("prefill", "cpu"), ("decode", "cpu")
FLIPPED = Flipped(P, D, 1)
FLEXIBLE = {"name": "cpu", "replicas": 2, "maxReplicas": 4, "flexible": True}
ON = both(
    at("spec.roles.prefill.pools", [{**FLEXIBLE, "replicas": 3}]),
    at("spec.roles.decode.pools", [FLEXIBLE]),
    at("spec.autoscale", {"mode": "On", "budget": {"total": 5}}),
)
SIZES = {P: 3, D: 2}


def cluster_of(change: Change = no_change) -> PDCluster:
    """Three flexible prefill workers and two of decode."""
    document = minimal()
    both(ON, change)(document)
    return parse(document)


CHAT = cluster_of()
REVISION = revision_of(CHAT.spec)
PREFILL, DECODE = (identity(REVISION, role) for role in ("prefill", "decode"))
FIRST = f"{PREFILL.name}-0"


def seen(
    serves: Mapping[str, str] | None = None,
    *,
    draining: frozenset[str] = frozenset(),
    status: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Observed:
    """All pods are ready but those that drain.  serves: roles that workers have by a command."""
    states = []
    for of, size in ((PREFILL, 3), (DECODE, 2)):
        pods = pod_states(of, range(size))
        pods = tuple(replace(pod, ready=pod.name not in draining, started=True) for pod in pods)
        ready = sum(pod.ready for pod in pods)
        states.append(workload(of, size, ready, pods=pods))
    said = {pod.name: "ready" for state in states for pod in state.pods}
    said |= dict.fromkeys(draining, "draining")
    records = WorkerRecords(said, roles={FIRST: "decode"}, serves=serves or {})
    return Observed(
        **{
            "generation": 1,
            "status": status or {},
            "discovery": ETCD_READY,
            "workloads": states,
            "scalers": [ScalerState(*P, 3, 3), ScalerState(*D, 2, 2)],
            "service_revision": REVISION,
            "service_role": "decode",
            "worker_records": records,
            **fields,
        }
    )


def decided(flipped: Flipped | None = FLIPPED) -> ScalingDecision:
    return ScalingDecision(SIZES, at=datetime(2026, 1, 2, tzinfo=UTC), flipped=flipped)


def recorded(flipped: Flipped | None = FLIPPED) -> Mapping[str, Any]:
    """The status that a decision is written into."""
    before = plan_all(CHAT, seen(), NOW).status
    found: Mapping[str, Any] = plan_all(
        CHAT, seen(status=before, decision=decided(flipped)), NOW
    ).status
    return found


def planned(observed: Observed, cluster: PDCluster = CHAT, now: str = LATER) -> Planned:
    return plan_all(cluster, observed, now)


def numbers(plan: Planned) -> dict[str, tuple[int, ...]]:
    return {
        role["name"]: tuple(role["pools"][0][name] for name in ("desired", "ready", "current"))
        for role in plan.status["roles"]
    }


FLIPPED_ONE = {FIRST: "decode"}


def test_decision_is_recorded_before_it_is_commanded():
    before = replace(seen(), worker_records=WorkerRecords(seen().worker_records.states))
    plan = planned(replace(before, decision=decided()))
    assert plan.reports_first
    entry = {"role": "prefill", "pool": "cpu", "servesPool": "cpu", "workers": 1}
    assert plan.status["autoscaling"]["flipped"] == [{**entry, "statefulSet": PREFILL.name}]
    followed = planned(replace(before, status=plan.status))
    assert (followed.roles, followed.reports_first) == ({FIRST: "decode"}, False)
    assert followed.needs_worker_records
    assert {each.id: each.replicas for each in followed.workloads} == {PREFILL: 3, DECODE: 2}


def test_same_decision_again_is_not_written_again():
    plan = planned(seen(FLIPPED_ONE, status=recorded(), decision=decided()))
    assert not plan.reports_first
    assert plan.status["autoscaling"] == recorded()["autoscaling"]


def test_flipped_worker_counts_for_the_role_that_it_serves():
    observed = seen(FLIPPED_ONE, status=recorded())
    plan = planned(observed)
    assert numbers(plan) == {"prefill": (2, 2, 2), "decode": (3, 3, 3)}
    assert (plan.status["prefill"], plan.status["decode"]) == ("2/2", "3/3")
    for kind in ("Ready", "PrefillReady", "DecodeReady"):
        assert condition_of(plan.status, kind)["status"] == "True"
    assert "3 ready decode workers" in condition_of(plan.status, "IngressReady")["message"]
    assert not plan.needs_worker_records
    assert serving_replicas(CHAT, plan.plan)["decode"] == 3


def test_accelerators_are_shown_by_the_role_that_is_served():
    price = at("spec.accelerators", {"cpu": {"pricePerHour": 1.0}})
    cluster = cluster_of(price)
    observed = as_served(flexible_pair(CHAT.spec), None, seen(FLIPPED_ONE))
    plan = planned(seen(FLIPPED_ONE, status=recorded()))
    found = accelerators_of_pools(cluster, plan.plan, observed)
    assert found == {(*P, "cpu"): (2, 2), (*D, "cpu"): (3, 3)}


def test_worker_that_drains_before_it_changes_is_missing_where_it_goes():
    plan = planned(seen(draining=frozenset({FIRST}), status=recorded()))
    assert numbers(plan) == {"prefill": (2, 2, 3), "decode": (3, 2, 2)}
    ready = condition_of(plan.status, "DecodeReady")
    assert (ready["status"], ready["reason"]) == ("False", "Scaling")
    assert condition_of(plan.status, "PrefillReady")["status"] == "True"
    assert plan.requeue_after_seconds == DRAIN_POLL_SECONDS
    assert plan.needs_worker_records


def test_pod_that_is_made_again_keeps_its_command():
    observed = seen(FLIPPED_ONE, status=recorded())
    state = observed.workloads[0]
    gone = replace(state, pods=state.pods[1:], current=2, ready=2)
    assert planned(replace(observed, workloads=[gone, observed.workloads[1]])).roles == FLIPPED_ONE


def test_without_etcd_a_worker_counts_by_its_command():
    away = WorkerRecords(error="it does not answer", again_seconds=5.0)
    plan = planned(seen(status=recorded(), worker_records=away))
    assert numbers(plan) == {"prefill": (2, 2, 2), "decode": (3, 3, 3)}
    assert facts_of(seen(status=recorded(), worker_records=away))[P].is_flipping


def facts_of(observed: Observed, cluster: PDCluster = CHAT) -> dict[Any, Any]:
    scraped = [pod.name for state in observed.workloads for pod in state.pods]
    requested = requested_sizes(cluster, observed)
    return {each.key: each for each in pool_facts(requested, observed, ScrapeState(scraped))}


def test_autoscaler_sees_workers_where_they_serve_and_accelerators_where_they_live():
    found = facts_of(seen(FLIPPED_ONE, status=recorded()))
    prefill, decode = found[P], found[D]
    assert (prefill.replicas, prefill.ready, prefill.num_requested, prefill.num_away) == (
        2,
        2,
        3,
        1,
    )
    assert (decode.replicas, decode.ready, decode.num_requested, decode.num_away) == (3, 3, 2, -1)
    assert (prefill.held(2).workers, prefill.held(3).workers) == (3, 4)
    assert (decode.held(3).workers, decode.held(4).workers) == (2, 3)
    assert (prefill.has_next, prefill.may_flip, prefill.is_flipping) == (True, True, False)
    assert found[P].unready_top == found[D].unready_top == 0


def test_next_worker_to_change_has_to_be_ready():
    second = frozenset({f"{PREFILL.name}-1"})
    found = facts_of(seen(FLIPPED_ONE, draining=second, status=recorded()))
    assert not found[P].has_next
    assert found[D].has_next


def test_shrinking_pool_loses_its_highest_workers_and_no_flipped_one():
    smaller = ScalingDecision({P: 2, D: 2}, at=datetime(2026, 1, 2, tzinfo=UTC), flipped=FLIPPED)
    status = plan_all(CHAT, seen(FLIPPED_ONE, decision=smaller), NOW).status
    plan = planned(seen(FLIPPED_ONE, status=status))
    assert plan.commands == {f"{PREFILL.name}-2"}
    assert plan.roles == FLIPPED_ONE


def test_last_worker_of_a_role_is_one_that_serves_it():
    """Those of prefill that stay are flipped: the surplus one keeps serving."""
    smaller = ScalingDecision({P: 1, D: 2}, at=datetime(2026, 1, 2, tzinfo=UTC), flipped=FLIPPED)
    status = plan_all(CHAT, seen(FLIPPED_ONE, decision=smaller), NOW).status
    plan = planned(seen(FLIPPED_ONE, status=status))
    assert plan.commands == frozenset()
    assert "keep serving" in condition_of(plan.status, "PrefillReady")["message"]


def test_rolling_brings_every_worker_back():
    status = recorded()
    cluster = cluster_of(
        both(at("spec.engine.maxSequences", 5), at("spec.rollout.strategy", "Rolling"))
    )
    observed = seen(FLIPPED_ONE, status=status, generation=2)
    plan = planned(observed, cluster)
    assert plan.roles == {}
    assert "flipped" not in plan.status["autoscaling"]
    assert facts_of(observed, cluster)[P].may_flip is False


@pytest.mark.parametrize("unavailable", [1, 2])
def test_rolling_takes_no_worker_beyond_those_that_may_be_missing(unavailable: int):
    """One that is not back yet is missing, too."""
    rollout = {"strategy": "Rolling", "maxSurge": 0, "maxUnavailable": unavailable}
    cluster = cluster_of(
        both(at("spec.engine.maxSequences", 5), at("spec.rollout", rollout)),
    )
    plan = planned(seen(FLIPPED_ONE, status=recorded(), generation=2), cluster)
    serving = {f"{PREFILL.name}-{number}" for number in (1, 2)} - plan.commands
    assert len(serving) == 3 - unavailable


@pytest.mark.parametrize("strategy", ["BlueGreen", "Recreate"])
def test_other_roll_outs_leave_workers_as_they_are_and_change_none(strategy: str):
    cluster = cluster_of(
        both(at("spec.engine.maxSequences", 5), at("spec.rollout.strategy", strategy))
    )
    observed = seen(FLIPPED_ONE, status=recorded(), generation=2)
    plan = planned(observed, cluster)
    facts = facts_of(observed, cluster)
    assert plan.roles == FLIPPED_ONE
    assert plan.status["autoscaling"]["flipped"] == recorded()["autoscaling"]["flipped"]
    assert facts[P].may_flip is False


def test_new_revision_takes_over_with_all_its_workers():
    """Those that are flipped are of the old one."""
    cluster = cluster_of(at("spec.engine.maxSequences", 5))
    new = revision_of(cluster.spec)
    old = seen(FLIPPED_ONE, status=recorded(), generation=2)

    def serving(ready: int) -> str:
        states = [workload(identity(new, "prefill"), 3, ready), workload(identity(new), 2)]
        return planned(replace(old, workloads=[*old.workloads, *states]), cluster).serving

    assert (serving(ready=2), serving(ready=3)) == (REVISION, new)


def test_workers_of_a_new_revision_begin_in_their_own_roles():
    """Its StatefulSets have other names."""
    cluster = cluster_of(at("spec.engine.maxSequences", 5))
    new = revision_of(cluster.spec)
    states = [
        workload(of, size, pods=pod_states(of, range(size)))
        for of, size in ((identity(new, "prefill"), 3), (identity(new), 2))
    ]
    observed = seen(status=recorded(), workloads=states, service_revision=new, generation=2)
    plan = planned(observed, cluster)
    assert plan.roles == {}
    assert "flipped" not in plan.status["autoscaling"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(at("spec.autoscale", {"mode": "Off"}), id="mode-off"),
        pytest.param(no_change, id="no-longer-flexible"),
    ],
)
def test_workers_go_back_where_the_object_no_longer_allows_it(change: Change):
    plain = [at(f"spec.roles.{role}.pools.0.flexible", False) for role in ("prefill", "decode")]
    plan = planned(seen(FLIPPED_ONE, status=recorded()), cluster_of(both(*plain, change)))
    assert plan.roles == {}
    assert plan.needs_worker_records
    assert "flipped" not in plan.status.get("autoscaling", {})


@pytest.mark.parametrize(
    "entry",
    [
        {"role": "prefill", "pool": "cpu", "servesPool": "cpu", "workers": "one"},
        {"role": "mixed", "pool": "cpu", "servesPool": "cpu", "workers": 1},
        {"role": "prefill", "pool": "other", "servesPool": "cpu", "workers": 1},
        "text",
        {
            "role": "prefill",
            "pool": "cpu",
            "servesPool": "cpu",
            "workers": 4,
            "statefulSet": PREFILL.name,
        },
    ],
)
def test_record_that_cannot_be_read_flips_none(entry: object):
    status = {**recorded(), "autoscaling": {**recorded()["autoscaling"], "flipped": [entry]}}
    assert requested_flips(CHAT.spec, seen(status=status)) is None


def test_disaggregation_is_read_by_the_role_that_is_served():
    reports = {FIRST: WorkerDisaggregation("tcp", long_prompts=100, remote_ratio=0.9)}
    observed = seen(FLIPPED_ONE, status=recorded())
    records = replace(observed.worker_records, disaggregation=reports)
    plan = planned(replace(observed, worker_records=records))
    assert condition_of(plan.status, "Disaggregating")["status"] == "True"


def test_pairs_are_verified_between_workers_in_their_own_roles():
    plan = planned(seen(FLIPPED_ONE, status=recorded()))
    (due,) = plan.verify
    assert due.workers == tuple(f"{DECODE.name}-{number}" for number in range(2))


def test_flipping_ends_when_all_have_the_role_that_they_should():
    def is_flipping(observed: Observed) -> bool:
        return desired_state(CHAT, observed, NOW).is_flipping

    assert is_flipping(seen(status=recorded()))
    assert not is_flipping(seen(FLIPPED_ONE, status=recorded()))
    assert is_flipping(seen(FLIPPED_ONE, status=recorded(None)))
