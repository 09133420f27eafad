"""The ServiceAccount of a cluster's pods: a name of their own, and no right to anything."""

from pdcluster_api.manifests.child_names import child_names
from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_schema.labels import cluster_labels
from pdcluster_schema.pdcluster import PDCluster


def service_account(cluster: PDCluster, owner: Owner) -> Manifest:
    """Without a mounted token; with the pull secrets, which a managed etcd's image from the same
    registry needs too.
    """
    secrets = [{"name": name} for name in cluster.spec.image.pull_secrets]
    parts = {"imagePullSecrets": secrets} if secrets else {}
    labels = cluster_labels(owner.name, "ingress")
    return new_object(
        "v1/ServiceAccount",
        child_names(owner.name).service_account,
        owner,
        labels,
        automountServiceAccountToken=False,
        **parts,
    )
