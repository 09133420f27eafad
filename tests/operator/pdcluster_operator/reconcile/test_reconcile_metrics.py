"""Metrics of a PDCluster, which the chart's alerts join on: there while it is, as it was shown
last.
"""

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.body import Key
from pdcluster_api.schema.qos import SloSpec
from pdcluster_operator.reconcile.metrics import LoopMetrics

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


def test_a_pdcluster_shows_its_answering_workers_and_its_objectives_until_it_is_gone() -> None:
    registry = CollectorRegistry()
    metrics = LoopMetrics(registry)
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
