"""The PrometheusRule of a cluster: `alerts` as Prometheus' operator takes them."""

from pdcluster_api.manifests.alerts import Alert, alerts_of
from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_api.manifests.promql import CLUSTER_LABEL, promql
from pdcluster_api.schema.labels import cluster_labels
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.sections import ROUTER


def prometheus_rule(cluster: PDCluster, owner: Owner, serving_role: str) -> Manifest:
    """One group of alerts about one cluster.  serving_role: of the workers that answer, which a roll out may be about to change."""
    has_routers, is_autoscaled = serving_role == ROUTER, cluster.spec.autoscale.mode != "Off"
    role = cluster.spec.decode_role if has_routers else serving_role
    labels = {**cluster.spec.monitoring.labels, **cluster_labels(owner.name, "ingress")}
    group = {
        "name": f"pdcluster-{owner.namespace}-{owner.name}",
        "rules": [_rule(alert, owner, role) for alert in alerts_of(role, has_routers=has_routers, is_autoscaled=is_autoscaled)],
    }
    return new_object("monitoring.coreos.com/v1/PrometheusRule", owner.name, owner, labels, spec={"groups": [group]})


def _rule(alert: Alert, owner: Owner, ingress_role: str) -> Manifest:
    where = f"PDCluster {owner.namespace}/{owner.name}"
    return {
        "alert": alert.name,
        "expr": promql(alert.expression, owner, ingress_role),
        "for": alert.lasting,
        "labels": {"severity": alert.severity, "namespace": owner.namespace, CLUSTER_LABEL: owner.name},
        "annotations": {"summary": f"{where}: {alert.summary}", "description": alert.description, "runbook": alert.runbook},
    }
