"""The two Services of a cluster: where clients ask, and the one that gives worker
pods their names.
"""

from pdcluster_api.manifests.objects import (
    OWNER_API_VERSION,
    Manifest,
    Owner,
    new_object,
    workload_selector,
)
from pdcluster_schema.labels import (
    CLUSTER,
    COMPONENT,
    ETCD,
    REVISION,
    ROLE,
    SEEN_REPLICAS,
    cluster_labels,
    pool_labels,
    workload_labels,
)
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import HTTP_PORT
from pdcluster_schema.service import EndpointPickerSpec
from pdcluster_schema.workload import WorkloadId


def ingress_service(cluster: PDCluster, owner: Owner, serving: str, role: str) -> Manifest:
    """The OpenAI API; changing `serving` switches the traffic at once."""
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


def inference_pool(picker: EndpointPickerSpec, owner: Owner, serving: str, role: str) -> Manifest:
    """The pods of the ingress Service, and the endpoint picker that chooses among them."""
    spec = {
        "selector": {"matchLabels": {CLUSTER: owner.name, ROLE: role, REVISION: serving}},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }
    return new_object(
        "inference.networking.k8s.io/v1/InferencePool",
        owner.name,
        owner,
        cluster_labels(owner.name, "ingress"),
        spec=spec,
    )


_KIND = "policy/v1/PodDisruptionBudget"


def workload_budget(owner: Owner, workload: WorkloadId, min_available: int) -> Manifest:
    labels = workload_labels(workload.cluster, workload.role, workload.pool, workload.revision)
    spec = _spec(workload_selector(workload), {"minAvailable": min_available})
    return new_object(_KIND, workload.name, owner, labels, spec=spec)


def etcd_budget(owner: Owner) -> Manifest:
    """Budget of a managed etcd of three, which lives as long as two do."""
    labels = cluster_labels(owner.name, ETCD)
    return new_object(
        _KIND,
        f"{owner.name}-etcd",
        owner,
        labels,
        spec=_spec({CLUSTER: owner.name, COMPONENT: ETCD}, {"maxUnavailable": 1}),
    )


def _spec(selector: dict[str, str], bound: dict[str, int]) -> Manifest:
    # AlwaysAllow: a pod that fails must not hold up the drain of its node, which may repair it.  A
    # worker that drains and is
    # evicted goes on draining within its grace period, as any that is evicted; nothing could keep
    # its node longer than that.
    return {
        **bound,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


KIND = "PDPoolScaler"


def render_scaler(owner: Owner, role: str, pool: str, replicas: int, seen: int) -> Manifest:
    """The /scale of one pool.

    replicas: what it starts with: the live size where there is one, else the pool's `replicas`
    seen:     the pool's `replicas`, kept beside it so that later only another value is a request
    """
    return new_object(
        f"{OWNER_API_VERSION}/{KIND}",
        f"{owner.name}-{role}-{pool}",
        owner,
        pool_labels(owner.name, role, pool),
        annotations={SEEN_REPLICAS: str(seen)},
        spec={"cluster": owner.name, "role": role, "pool": pool, "replicas": replicas},
    )
