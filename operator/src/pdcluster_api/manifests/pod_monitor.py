"""The PodMonitor: Prometheus scrapes every worker, and its series carry role, pool and revision.

A user that may write a PDCluster chooses the image, and with it the content of `/metrics`, in a
Prometheus that is often everybody's.  So each scrape is bounded; one beyond a bound fails whole.
"""

from pdcluster_api.manifests.objects import Manifest, Owner, new_object, workers_selector
from pdcluster_api.manifests.promql import CLUSTER_LABEL, WORKLOAD_LABELS
from pdcluster_api.schema.labels import CLUSTER, GROUP, cluster_labels
from pdcluster_api.schema.pdcluster import PDCluster

LIMITS: Manifest = {
    "sampleLimit": 5000,
    "labelLimit": 32,
    "labelNameLengthLimit": 128,
    "labelValueLengthLimit": 512,
    "bodySizeLimit": "1MB",
}
"""Of one scrape of one worker, several times what a worker has.

The last is known to the Prometheus operator since 0.73.
"""


def pod_monitor(cluster: PDCluster, owner: Owner) -> Manifest:
    """PodMonitor of all workers of a cluster, ready or not."""
    labels = {**cluster.spec.monitoring.labels, **cluster_labels(owner.name, "ingress")}
    spec = {"selector": workers_selector(owner.name), "podMetricsEndpoints": [_endpoint()], **LIMITS}
    return new_object("monitoring.coreos.com/v1/PodMonitor", owner.name, owner, labels, spec=spec)


def _endpoint() -> Manifest:
    pod_labels = {CLUSTER_LABEL: CLUSTER, **{label: f"{GROUP}/{label}" for label in WORKLOAD_LABELS}}
    return {
        "port": "http",
        "path": "/metrics",
        "interval": "15s",
        "relabelings": [_relabeling(key, target) for target, key in pod_labels.items()],
    }


def _relabeling(key: str, target: str) -> Manifest:
    source = "__meta_kubernetes_pod_label_" + key.replace(".", "_").replace("/", "_")
    return {"action": "replace", "sourceLabels": [source], "targetLabel": target}
