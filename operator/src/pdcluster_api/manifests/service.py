"""The two Services of a cluster: where clients ask, and the one that gives worker
pods their names.
"""

from pdcluster_api.manifests.objects import HTTP_PORT, Manifest, Owner, new_object
from pdcluster_schema.labels import CLUSTER, REVISION, ROLE, cluster_labels
from pdcluster_schema.pdcluster import PDCluster


def ingress_service(cluster: PDCluster, owner: Owner, serving: str, role: str) -> Manifest:
    """The OpenAI API over the ready workers of one revision and role; changing `serving` switches
    the traffic at once.
    """
    service = cluster.spec.service
    spec = {
        "type": service.type,
        "selector": {CLUSTER: owner.name, ROLE: role, REVISION: serving},
        "ports": [
            {
                "name": "http",
                "port": service.port,
                "targetPort": "http",
                "protocol": "TCP",
                "appProtocol": "http",
            }
        ],
    }
    return new_object(
        "v1/Service",
        owner.name,
        owner,
        cluster_labels(owner.name, "ingress"),
        annotations=service.annotations,
        spec=spec,
    )


def workers_service(owner: Owner) -> Manifest:
    """The headless Service of all worker StatefulSets: names for pods, ready or not."""
    # By the application's name, which an etcd pod does not share: a Service cannot ask for "has a
    # role".
    selector = {CLUSTER: owner.name, "app.kubernetes.io/name": "pdcluster"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [
            {
                "name": "http",
                "port": HTTP_PORT,
                "targetPort": "http",
                "protocol": "TCP",
                "appProtocol": "http",
            }
        ],
    }
    return new_object(
        "v1/Service",
        f"{owner.name}-workers",
        owner,
        cluster_labels(owner.name, "ingress"),
        spec=spec,
    )
