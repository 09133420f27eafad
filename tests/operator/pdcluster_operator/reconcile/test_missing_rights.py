"""Kinds that a cluster asks for, and that the operator has no right to: said in the status, but only where they would be made."""

from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import Capabilities, Site
from pdcluster_api.schema.load import parse
from pdcluster_operator.reconcile.desired import Rendering
from pdcluster_operator.reconcile.records import Records
from tests.operator import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)


def rendering(capabilities: Capabilities, **monitoring: Any) -> Rendering:
    pools = {"pools": [{"name": "first", "gpu": "cpu", "replicas": 1}]}
    model = {"name": "tiny", "path": "/models/tiny"}
    cluster = parse(made.cluster(spec={"model": model, "roles": {"mixed": pools}, "monitoring": monitoring}))
    records = Records(cluster, Live(made.cluster(), []), OWNER, "worker:1", has_client_certificate=False)
    return Rendering(cluster, OWNER, Site("worker:1", "etcd:1", "system"), capabilities, records)


@pytest.mark.parametrize(
    ("forbidden", "monitoring", "said"),
    [
        ({"PodMonitor", "PrometheusRule"}, {}, ["PodMonitor chat", "PrometheusRule chat"]),
        ({"PodMonitor"}, {}, ["PodMonitor chat"]),
        ({"PodMonitor", "PrometheusRule"}, {"alerts": False}, ["PodMonitor chat"]),
        ({"PodMonitor", "PrometheusRule"}, {"podMonitor": False}, []),
        ({"PrometheusRule"}, {}, []),  # without PodMonitors no rule is made
        (set(), {}, []),
    ],
)
def test_what_is_asked_for_and_forbidden_is_a_failure(forbidden: set[str], monitoring: dict[str, Any], said: list[str]):
    capabilities = Capabilities(pod_monitor=False, prometheus_rule=False, forbidden=frozenset(forbidden))
    failures = rendering(capabilities, **monitoring).forbidden()
    assert [failure.object for failure in failures] == said
    assert {failure.reason for failure in failures} <= {"Forbidden"}


@pytest.mark.parametrize(("kind", "field"), [("PodMonitor", "podMonitor"), ("PrometheusRule", "alerts")])
def test_it_says_what_to_do(kind: str, field: str):
    capabilities = Capabilities(pod_monitor=kind != "PodMonitor", prometheus_rule=False, forbidden=frozenset({kind}))
    (failure,) = rendering(capabilities).forbidden()
    assert "give it to the operator's ServiceAccount" in failure.message
    assert failure.message.endswith(f"and restart the operator, or set spec.monitoring.{field} to false")
