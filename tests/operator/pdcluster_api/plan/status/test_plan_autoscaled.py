"""The autoscaler's record: sizes of the pools, status, and events."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.plan.autoscale.explain import MAX_DECISIONS
from pdcluster_api.plan.observed.state import (
    DecisionStep,
    Observed,
    Problem,
    ScalerState,
    ScalingDecision,
)
from pdcluster_api.plan.status.autoscaled import recorded
from pdcluster_schema import conditions as words
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster
from tests.operator.pdcluster_api.plan.clusters import (
    LATER,
    NOW,
    Planned,
    condition_of,
    make_cluster,
    plan_all,
    running,
)

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DECODE, PREFILL = ("decode", "cpu"), ("prefill", "cpu")


def scaled_cluster(mode: str = "On", **fields: Any) -> PDCluster:
    cluster = make_cluster(**fields)
    autoscale = AutoscaleSpec.model_validate({"mode": mode})
    return cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"autoscale": autoscale})}
    )


def decision(decode: int, *problems: Problem, prefill: int = 1, before: int = 2) -> ScalingDecision:
    steps = (
        (DecisionStep("pool", "decode/cpu", before, decode, "the cheapest pool"),)
        if decode != before
        else ()
    )
    return ScalingDecision(
        {PREFILL: prefill, DECODE: decode}, steps=steps, problems=problems, at=AT
    )


def plan_of(
    cluster: PDCluster, observed: Observed, decided: ScalingDecision | None = None, now: str = NOW
) -> Planned:
    return plan_all(cluster, replace(observed, decision=decided), now)


def recorded_at(cluster: PDCluster, decode: int, **fields: Any) -> Observed:
    """All as declared, with a record that asks for so many decode workers."""
    observed = running(cluster)
    status = plan_of(cluster, observed, decision(decode)).status
    return replace(observed, **{"status": status, **fields})


def sizes(plan: Planned) -> Mapping[tuple[str, str], int]:
    return {(each.id.role, each.id.pool): each.replicas for each in plan.workloads}


def reasons(plan: Planned) -> list[str]:
    return [each.reason for each in plan.events]


def test_a_decision_is_in_the_status_and_has_to_be_written_first() -> None:
    cluster = scaled_cluster()
    plan = plan_of(cluster, running(cluster), decision(3))

    assert plan.reports_first
    field = plan.status["autoscaling"]
    assert (field["mode"], recorded(plan.status, "On")) == ("On", {PREFILL: 1, DECODE: 3})
    assert [(entry["at"], entry["mode"]) for entry in field["lastDecisions"]] == [
        ("2026-01-02T03:04:05Z", "On")
    ]
    assert "Autoscaled" in reasons(plan)


def test_the_record_sizes_statefulsets_and_scalers_without_a_decision() -> None:
    cluster = scaled_cluster()
    plan = plan_of(cluster, recorded_at(cluster, 3), now=LATER)

    assert not plan.reports_first
    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {3}
    assert [scaler.request for scaler in plan.scalers if scaler.role == "decode"] == [3]
    assert [scaler.request for scaler in plan.scalers if scaler.role == "prefill"] == [None]
    assert "Autoscaled" not in reasons(plan)


@pytest.mark.parametrize(
    "decided", [None, decision(3, before=3)], ids=["no numbers", "the same again"]
)
def test_what_changes_nothing_leaves_the_status_as_it_is(decided: ScalingDecision | None) -> None:
    cluster = scaled_cluster()
    observed = recorded_at(
        cluster,
        3,
        scalers=[ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 3, 2)],
    )
    first = plan_of(cluster, observed)
    again = plan_of(cluster, replace(observed, status=first.status), decided, LATER)

    assert again.status == first.status
    assert not again.reports_first


def test_the_first_decision_is_recorded_even_if_it_changes_nothing() -> None:
    cluster = scaled_cluster()
    plan = plan_of(cluster, running(cluster), decision(2))

    assert plan.reports_first
    assert recorded(plan.status, "On") == {PREFILL: 1, DECODE: 2}
    assert "Autoscaled" not in reasons(plan)


def test_without_a_record_the_present_sizes_count() -> None:
    cluster = scaled_cluster()
    plan = plan_of(
        cluster,
        running(
            cluster,
            scalers=[ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 5, 2)],
        ),
    )

    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {5}
    assert "autoscaling" not in plan.status


def test_a_pool_that_the_record_does_not_know_has_its_own_size() -> None:
    cluster = scaled_cluster(
        decode=({"name": "cpu", "replicas": 2}, {"name": "new", "replicas": 4})
    )
    observed = running(cluster)
    status = {
        "autoscaling": {
            "mode": "On",
            "replicas": [{"role": "decode", "pool": "cpu", "replicas": 3}],
        }
    }
    plan = plan_of(cluster, replace(observed, status=status))

    assert sizes(plan) == {("prefill", "cpu"): 1, ("decode", "cpu"): 3, ("decode", "new"): 4}


def test_advise_shows_and_changes_nothing() -> None:
    cluster = scaled_cluster("Advise")
    plan = plan_of(cluster, running(cluster), decision(3))
    after = plan_of(cluster, replace(running(cluster), status=plan.status), now=LATER)

    assert not plan.reports_first
    assert plan.status["autoscaling"]["mode"] == "Advise"
    assert reasons(plan).count("Advised") == 1
    for each in (plan, after):
        assert {size for key, size in sizes(each).items() if key[0] == "decode"} == {2}
        assert [scaler.request for scaler in each.scalers] == [None, None]


def test_what_was_advised_sizes_nothing_when_the_mode_becomes_on() -> None:
    advised = scaled_cluster("Advise")
    status = plan_of(advised, running(advised), decision(3)).status
    plan = plan_of(scaled_cluster("On"), replace(running(advised), status=status), now=LATER)

    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {2}


def test_off_removes_the_field_and_keeps_the_sizes_that_scalers_have() -> None:
    cluster = scaled_cluster()
    observed = recorded_at(
        cluster,
        3,
        scalers=[ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 3, 2)],
    )
    plan = plan_of(scaled_cluster("Off"), observed, now=LATER)

    assert "autoscaling" not in plan.status
    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {3}


def test_a_scale_by_another_writer_is_reverted_with_an_event() -> None:
    cluster = scaled_cluster()
    scalers = [
        ScalerState("prefill", "cpu", 1, 1),
        ScalerState("decode", "cpu", 7, 2, writer="kubectl"),
    ]
    plan = plan_of(cluster, recorded_at(cluster, 3, scalers=scalers), now=LATER)

    assert [scaler.request for scaler in plan.scalers if scaler.role == "decode"] == [3]
    (told,) = [each for each in plan.events if each.reason == words.SCALERS_OVERRIDDEN]
    assert told.warning


def test_a_scaler_that_another_writer_scaled_and_that_only_has_to_follow_makes_no_event() -> None:
    cluster = scaled_cluster()
    scalers = [
        ScalerState("prefill", "cpu", 1, 1),
        ScalerState("decode", "cpu", 2, 2, writer="kubectl"),
    ]
    plan = plan_of(cluster, recorded_at(cluster, 3, scalers=scalers), now=LATER)

    assert [scaler.request for scaler in plan.scalers if scaler.role == "decode"] == [3]
    assert words.SCALERS_OVERRIDDEN not in reasons(plan)


def test_replicas_in_the_file_are_not_taken_over_and_an_event_says_so() -> None:
    observed = recorded_at(
        scaled_cluster(),
        3,
        scalers=[ScalerState("prefill", "cpu", 1, 1), ScalerState("decode", "cpu", 3, 2)],
    )
    plan = plan_of(scaled_cluster(decode=({"name": "cpu", "replicas": 6},)), observed, now=LATER)

    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {3}
    assert [
        (scaler.request, scaler.seen) for scaler in plan.scalers if scaler.role == "decode"
    ] == [(3, 6)]
    assert reasons(plan).count(words.SCALERS_OVERRIDDEN) == 1


def test_problems_are_conditions_while_they_last() -> None:
    cluster = scaled_cluster()
    problems = [
        Problem(words.METRICS_MISSING, "prefill: none"),
        Problem(words.METRICS_MISSING, "decode: none"),
    ]
    first = plan_of(cluster, running(cluster), decision(2, *problems))
    between = plan_of(cluster, replace(running(cluster), status=first.status), now=LATER)
    after = plan_of(cluster, replace(running(cluster), status=between.status), decision(2), LATER)

    shown = condition_of(first.status, words.METRICS_MISSING)
    assert (shown["status"], shown["reason"], shown["message"]) == (
        "True",
        words.METRICS_MISSING,
        "prefill: none; decode: none",
    )
    assert condition_of(between.status, words.METRICS_MISSING) == shown
    assert condition_of(after.status, words.METRICS_MISSING) == {}
    assert not after.reports_first


@pytest.mark.parametrize(
    "field",
    [
        None,
        7,
        {},
        {"mode": "On"},
        {"mode": "On", "replicas": [{"role": "decode"}]},
        {"mode": "Advise"},
    ],
)
def test_a_record_that_cannot_be_read_is_none(field: object) -> None:
    cluster = scaled_cluster()
    plan = plan_of(cluster, replace(running(cluster), status={"autoscaling": field}))

    assert recorded({"autoscaling": field}, "On") is None
    assert {size for key, size in sizes(plan).items() if key[0] == "decode"} == {2}


def test_decisions_are_kept_to_a_bound() -> None:
    cluster = scaled_cluster()
    observed = running(cluster)
    for size in range(1, MAX_DECISIONS + 5):
        observed = replace(observed, status=plan_of(cluster, observed, decision(size)).status)

    assert len(observed.status["autoscaling"]["lastDecisions"]) == MAX_DECISIONS
