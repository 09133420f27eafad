"""Metrics of a PDCluster, which the chart's alerts join on: there while it is, as it was shown
last.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.plan.autoscale.values import Memory, Outcome
from pdcluster_api.plan.observed.state import Flipped, Problem, ScalingDecision
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics, ControllerMetrics
from pdcluster_schema.conditions import KV_TRANSFER_VERIFIED
from pdcluster_schema.load import parse
from pdcluster_schema.qos import SloSpec
from tests.schema.object_cases import at, minimal

ONE, OTHER = Key("models", "chat"), Key("research", "chat")


def shown(registry: CollectorRegistry, name: str, label: str) -> dict[tuple[str, str], float]:
    """Values of a gauge by namespace and one more label."""
    samples = (
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"pdcluster_operator_{name}"
    )
    return {(sample.labels["namespace"], sample.labels[label]): sample.value for sample in samples}


def test_accelerators_and_prices_are_there_where_a_pool_has_them() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    document = minimal()
    at("spec.accelerators", {"B200": {"pricePerHour": 5.5}})(document)
    spec = parse(document).spec
    pools = {("decode", "x", "B200"): (16, 8), ("prefill", "y", "H100"): (4, 4)}

    metrics.capacity.show(ONE, spec, pools)
    metrics.capacity.show(OTHER, spec, {})

    assert shown(registry, "accelerators", "role") == {
        ("models", "decode"): 8,
        ("models", "prefill"): 4,
    }
    assert shown(registry, "accelerator_price_per_hour", "gpu") == {("models", "B200"): 5.5}
    labels = {"namespace": "models", "pdcluster": "chat", "role": "decode", "pool": "x"}
    of_pool = labels | {"gpu": "B200", "state": "desired"}
    assert registry.get_sample_value("pdcluster_operator_accelerators", of_pool) == 16
    metrics.forget(ONE)
    assert shown(registry, "accelerators", "role") == {}
    assert shown(registry, "accelerator_price_per_hour", "gpu") == {}


def test_a_pdcluster_shows_its_answering_workers_and_its_objectives_until_it_is_gone() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    metrics.show_cluster(ONE, {"decode": 1, "router": 0}, SloSpec())
    metrics.show_cluster(
        ONE,
        {"decode": 3, "router": 2},
        SloSpec.model_validate({"ttftMilliseconds": 2000.0, "tpotMilliseconds": 50.0}),
    )
    metrics.show_cluster(OTHER, {"decode": 0, "router": 0}, SloSpec())

    assert shown(registry, "serving_replicas", "role") == {
        ("models", "decode"): 3,
        ("models", "router"): 2,
        ("research", "decode"): 0,
        ("research", "router"): 0,
    }
    assert shown(registry, "slo_seconds", "objective") == {
        ("models", "ttft"): 2.0,
        ("models", "tpot"): 0.05,
        ("research", "ttft"): 0.5,
        ("research", "tpot"): 0.0,  # none
    }
    metrics.forget(ONE)
    assert {namespace for namespace, _ in shown(registry, "serving_replicas", "role")} == {
        "research"
    }
    assert {namespace for namespace, _ in shown(registry, "slo_seconds", "objective")} == {
        "research"
    }


def rates(*pairs: tuple[str, str, float]) -> dict[str, Any]:
    return {
        "conditions": [{"type": KV_TRANSFER_VERIFIED, "status": "True", "reason": "KVMoved"}],
        "transfers": {
            "pairs": [
                {"prefill": prefill, "decode": decode, "bytesPerSecond": rate}
                for prefill, decode, rate in pairs
            ]
        },
    }


def test_rates_and_the_condition_are_those_of_the_last_status() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    name = "kv_transfer_verified_bytes_per_second"
    metrics.show_status(ONE, rates(("fast", "cpu", 7.0), ("slow", "cpu", 1.0)))
    metrics.show_status(OTHER, rates(("fast", "cpu", 5.0)))
    metrics.show_status(ONE, rates(("fast", "cpu", 8.0)))
    assert shown(registry, name, "prefill") == {("models", "fast"): 8.0, ("research", "fast"): 5.0}
    metrics.show_status(ONE, {})
    assert shown(registry, name, "prefill") == {("research", "fast"): 5.0}
    assert shown(registry, "condition", "reason") == {("research", "KVMoved"): 1.0}
    metrics.forget(OTHER)
    assert not shown(registry, name, "prefill")
    assert not shown(registry, "condition", "reason")


def test_of_conditions_those_with_an_alert_are_shown_with_their_reason() -> None:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    found = [
        {"type": "Ready", "status": "False", "reason": "Starting"},
        {"type": "Stalled", "status": "True", "reason": "InvalidSpec"},
        {"type": "KVTransferVerified", "status": "Unknown", "reason": "NotVerified"},
        {"type": "PrefillReady", "status": "True", "reason": "AsDeclared"},
    ]
    metrics.show_status(ONE, {"conditions": found})
    assert shown(registry, "condition", "reason") == {
        ("models", "Starting"): 0.0,
        ("models", "InvalidSpec"): 1.0,
    }
    metrics.show_status(ONE, {"conditions": [{**found[0], "reason": "RollingOut"}]})
    assert shown(registry, "condition", "reason") == {("models", "RollingOut"): 0.0}


def test_the_end_of_the_certificate_is_shown_while_there_is_one() -> None:
    registry = CollectorRegistry()
    metrics, name = ControllerMetrics(registry), "certificate_expiry_timestamp_seconds"
    for key in (ONE, OTHER):
        metrics.show_certificates(key, datetime(2026, 1, 2, tzinfo=UTC))
    metrics.show_certificates(ONE, None)
    assert shown(registry, name, "pdcluster") == {("research", "chat"): 1767312000.0}
    metrics.forget(OTHER)
    assert not shown(registry, name, "pdcluster")


def outcome(*pools: str, problems: int = 0) -> Outcome:
    replicas = dict.fromkeys((("decode", pool) for pool in pools), 1)
    problem = Problem("NoRoom", "no node")
    return Outcome(ScalingDecision(replicas, problems=(problem,) * problems), Memory())


def test_a_decision_is_shown_in_place_of_the_one_before_until_the_pdcluster_is_gone() -> None:
    registry = CollectorRegistry()
    metrics = AutoscaleMetrics(registry)
    metrics.show(ONE, outcome("cpu", "gpu", problems=2), None)
    metrics.show(OTHER, outcome("cpu"), None)
    metrics.show(ONE, outcome("cpu"), None)
    pools = {("models", "cpu"): 1.0, ("research", "cpu"): 1.0}
    assert shown(registry, "autoscale_replicas", "pool") == pools
    assert not shown(registry, "autoscale_problems", "reason")
    metrics.forget(ONE)
    assert shown(registry, "autoscale_replicas", "pool") == {("research", "cpu"): 1.0}
    metrics.show(ONE, outcome("cpu"), None)  # one of that name again
    assert shown(registry, "autoscale_replicas", "pool") == pools


def test_flips_are_counted_by_the_roles_before_and_after() -> None:
    def flipped(number: int) -> Outcome:
        keys = ("prefill", "gpu"), ("decode", "gpu")
        decision = ScalingDecision(dict.fromkeys(keys, 3), flipped=Flipped(*keys, number))
        return Outcome(replace(decision, flipped=decision.flipped if number else None), Memory())

    registry = CollectorRegistry()
    metrics, before = AutoscaleMetrics(registry), None
    for number in (0, 1, 1, 2, 1):
        after = flipped(number)
        metrics.show(ONE, after, before)
        before = after
    found = {("models", "prefill"): 2.0, ("models", "decode"): 1.0}
    assert shown(registry, "role_flips_total", "from") == found
    metrics.forget(ONE)
    assert not shown(registry, "role_flips_total", "from")


def test_showing_a_pdcluster_searches_no_series_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(gauge: Gauge, labels: dict[str, str]) -> None:
        raise AssertionError(f"all series of {gauge} are searched")

    monkeypatch.setattr(Gauge, "remove_by_labels", search)
    loop, scaling = ControllerMetrics(CollectorRegistry()), AutoscaleMetrics(CollectorRegistry())
    for _ in range(2):
        loop.show_cluster(ONE, {"decode": 1}, SloSpec())
        loop.show_status(ONE, rates(("fast", "cpu", 7.0)))
        scaling.show(ONE, outcome("cpu", problems=1), None)
