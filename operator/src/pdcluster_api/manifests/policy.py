"""The policy ConfigMap: routing and admission, read again by running workers when it changes."""

from pdcluster_api.manifests.engine_config import POLICY_FILE
from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_api.manifests.yaml_text import yaml_text
from pdcluster_schema.labels import cluster_labels
from pdcluster_schema.pdcluster import PDCluster


def policy_config(cluster: PDCluster, owner: Owner) -> Manifest:
    """The ConfigMap that every worker of a cluster mounts, of whatever revision."""
    data = {POLICY_FILE: yaml_text(policy_file(cluster))}
    return new_object(
        "v1/ConfigMap",
        f"{owner.name}-policy",
        owner,
        cluster_labels(owner.name, "ingress"),
        data=data,
    )
