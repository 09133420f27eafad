"""The Grafana dashboard of a cluster, in a ConfigMap that Grafana's sidecar finds by its label."""

import hashlib
import json
from string import ascii_uppercase

from pdcluster_api.manifests.dashboard_panels import Panel, panels_of
from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_api.manifests.promql import promql
from pdcluster_api.schema.labels import cluster_labels
from pdcluster_api.schema.pdcluster import PDCluster

_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8  # Grafana's grid is 24 wide
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UID_LENGTH = 32  # Grafana takes 40


def dashboard_config(cluster: PDCluster, owner: Owner) -> Manifest:
    """The ConfigMap, with one JSON file."""
    labels = {**cluster.spec.monitoring.labels, "grafana_dashboard": "1", **cluster_labels(owner.name, "ingress")}
    data = {f"pdcluster-{owner.namespace}-{owner.name}.json": json.dumps(_dashboard(cluster, owner))}
    return new_object("v1/ConfigMap", f"{owner.name}-dashboard", owner, labels, data=data)


def _dashboard(cluster: PDCluster, owner: Owner) -> Manifest:
    where, role = f"{owner.namespace}/{owner.name}", cluster.spec.decode_role
    panels = panels_of(role, is_autoscaled=cluster.spec.autoscale.mode != "Off")
    return {
        "uid": hashlib.sha256(where.encode()).hexdigest()[:_UID_LENGTH],  # a dashboard that is made again keeps its address
        "title": f"PDCluster {where}",
        "tags": ["pdcluster"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(index, panel, owner, role) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel, owner: Owner, ingress_role: str) -> Manifest:
    targets = [
        {"refId": letter, "datasource": _SOURCE, "expr": promql(query.expression, owner, ingress_role), "legendFormat": query.legend}
        for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
    ]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": index % _COLUMNS * _WIDTH, "y": index // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
