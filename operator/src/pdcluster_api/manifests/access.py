"""Access to the pods of a cluster, and its fences: Services, the InferencePool, budgets,
scalers, NetworkPolicies (ingress only), the ServiceAccount and the TLS Secrets.
"""

import base64
from collections.abc import Mapping
from typing import Any

from pdcluster_api.manifests.groups import group_budget
from pdcluster_api.manifests.objects import (
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    OWNER_API_VERSION,
    Manifest,
    Owner,
    child_names,
    etcd_object,
    etcd_selector,
    headless,
    labels_of,
    new_object,
    policy_name,
    shared_object,
    workers_selector,
    workload_selector,
)
from pdcluster_schema.labels import (
    CLUSTER,
    REVISION,
    ROLE,
    SEEN_REPLICAS,
    TEMPLATE,
    pool_labels,
)
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import (
    GRPC_PORT,
    HEAD_PORT,
    HTTP_PORT,
    KV_PORT,
    NUM_KV_PORTS,
    NUM_UCX_PORTS,
    PICKER_PORT,
)
from pdcluster_schema.sections import PICKER
from pdcluster_schema.service import EndpointPickerSpec
from pdcluster_schema.workload import WorkloadId

KIND = "PDPoolScaler"

_KV_PORTS: Manifest = {
    "port": KV_PORT,
    "endPort": KV_PORT + NUM_KV_PORTS + NUM_UCX_PORTS - 1,
    "protocol": "TCP",
}
_POLICY = "networking.k8s.io/v1/NetworkPolicy"
_BUDGET = "policy/v1/PodDisruptionBudget"
_NO_ANNOTATIONS: Mapping[str, str] = {}


def workers_policy(
    owner: Owner,
    operator_namespace: str,
    *,
    has_stock_engines: bool = False,
    has_groups: bool = False,
    has_pickers: bool = False,
) -> Manifest:
    """HTTP, and a picker's port, from anywhere (clients, gateways, probes, Prometheus); gRPC and KV
    from this cluster's workers, gRPC from the operator too.

    has_stock_engines: any port from them, since a stock engine moves KV over ports of its choice
    has_groups: and the port where a worker's engines in other pods join
    """
    workers = workers_selector(owner.name)
    peers: Manifest = {"from": [{"podSelector": workers}]}
    if not has_stock_engines:
        heads = [_policy_port(HEAD_PORT)] if has_groups else []
        peers["ports"] = [_policy_port(GRPC_PORT), *heads, _KV_PORTS]
    operator = {"ports": [_policy_port(GRPC_PORT)], "from": [_namespace(operator_namespace)]}
    public = [HTTP_PORT, PICKER_PORT] if has_pickers else [HTTP_PORT]
    rules = [{"ports": [_policy_port(number) for number in public]}, peers, operator]
    return shared_object(_POLICY, policy_name(owner.name), owner, spec=_policy(workers, rules))


def etcd_policy(owner: Owner, operator_namespace: str) -> Manifest:
    """Clients are this cluster's workers and the operator; members reach each other."""
    members = {"matchLabels": etcd_selector(owner)}
    clients = [{"podSelector": workers_selector(owner.name)}, _namespace(operator_namespace)]
    rules = [
        {"ports": [_policy_port(ETCD_CLIENT_PORT)], "from": clients},
        {"ports": [_policy_port(ETCD_PEER_PORT)], "from": [{"podSelector": members}]},
    ]
    name = f"{policy_name(owner.name)}-etcd"
    return etcd_object(_POLICY, name, owner, spec=_policy(members, rules))


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _policy(pods: Manifest, rules: list[Manifest]) -> Manifest:
    return {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}


def _policy_port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}


def service_account(cluster: PDCluster, owner: Owner) -> Manifest:
    """Without a mounted token; with the pull secrets, which the etcd's image needs too."""
    secrets = [{"name": name} for name in cluster.spec.image.pull_secrets]
    parts = {"imagePullSecrets": secrets} if secrets else {}
    name = child_names(owner.name).service_account
    return shared_object(
        "v1/ServiceAccount", name, owner, automountServiceAccountToken=False, **parts
    )


def render_tls_secrets(
    owner: Owner,
    ca: Mapping[str, bytes],
    tls: Mapping[str, bytes],
    *,
    ca_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
    tls_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
) -> tuple[Manifest, Manifest]:
    """The authority's and the workers', to be written in this order.  In PEM:

    ca:  tls.crt and tls.key of the authority
    tls: ca.crt (every authority that is accepted), tls.crt and tls.key of the workers
    """
    names = child_names(owner.name)
    return (
        _secret(owner, names.authority, ca, ca_annotations),
        _secret(owner, names.certificates, tls, tls_annotations),
    )


def _secret(
    owner: Owner, name: str, content: Mapping[str, bytes], annotations: Mapping[str, str]
) -> Manifest:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return shared_object(
        "v1/Secret", name, owner, annotations=annotations, type="kubernetes.io/tls", data=data
    )


def ingress_service(cluster: PDCluster, owner: Owner, serving: str | None, role: str) -> Manifest:
    """The OpenAI API; changing `serving` switches the traffic at once; None = all revisions."""
    service = cluster.spec.service
    revision = {} if serving is None else {REVISION: serving}
    spec = {
        "type": service.type,
        "selector": {CLUSTER: owner.name, ROLE: role, **revision},
        "ports": [_http_port(service.port)],
    }
    return shared_object(
        "v1/Service", owner.name, owner, annotations=service.annotations, spec=spec
    )


def workers_service(owner: Owner) -> Manifest:
    """The headless Service of all worker StatefulSets."""
    # By the application's name, which an etcd pod does not share: a Service cannot ask for "has a
    # role".
    selector = {CLUSTER: owner.name, "app.kubernetes.io/name": "pdcluster"}
    spec = headless(selector, _http_port(HTTP_PORT))
    return shared_object("v1/Service", f"{owner.name}-workers", owner, spec=spec)


def _http_port(number: int) -> Manifest:
    return {
        "name": "http",
        "port": number,
        "targetPort": "http",
        "protocol": "TCP",
        "appProtocol": "http",
    }


def picker_service(picker: EndpointPickerSpec, owner: Owner, serving: str) -> Manifest:
    """The cluster's own pickers, for gateways; they speak TLS."""
    port = {"name": "grpc", "port": picker.port, "targetPort": PICKER_PORT, "protocol": "TCP"}
    selector = {CLUSTER: owner.name, ROLE: PICKER, REVISION: serving}
    spec = {"selector": selector, "ports": [port]}
    return shared_object("v1/Service", f"{owner.name}-picker", owner, spec=spec)


def inference_pool(
    picker: EndpointPickerSpec, owner: Owner, serving: str | None, role: str
) -> Manifest:
    """The pods of the ingress Service, and the endpoint picker that chooses among them.  Our own
    picker chooses pods of its own revision: a roll out switches its Service alone.

    serving: as for the ingress Service
    """
    revision = {} if picker.name is None or serving is None else {REVISION: serving}
    spec = {
        "selector": {"matchLabels": {CLUSTER: owner.name, ROLE: role, **revision}},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name or f"{owner.name}-picker",
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }
    kind = "inference.networking.k8s.io/v1/InferencePool"
    return shared_object(kind, owner.name, owner, spec=spec)


def workload_budget(
    owner: Owner, workload: WorkloadId, min_available: int, num_pods: int = 1
) -> Manifest:
    """min_available: workers, of so many pods each"""
    spec = _budget(workload_selector(workload), {"minAvailable": min_available})
    if num_pods > 1:
        spec |= group_budget(workload, min_available, num_pods)
    if not workload.template:  # a pod of two budgets could not be evicted at all
        others = spec["selector"].get("matchExpressions", [])
        own = {"key": TEMPLATE, "operator": "DoesNotExist"}
        spec["selector"] = {**spec["selector"], "matchExpressions": [*others, own]}
    return new_object(_BUDGET, workload.name, owner, labels_of(workload), spec=spec)


def etcd_budget(owner: Owner) -> Manifest:
    """Budget of a managed etcd of three, which lives as long as two do."""
    spec = _budget(etcd_selector(owner), {"maxUnavailable": 1})
    return etcd_object(_BUDGET, f"{owner.name}-etcd", owner, spec=spec)


def _budget(selector: dict[str, str], bound: dict[str, int]) -> dict[str, Any]:
    # AlwaysAllow: a pod that fails must not hold up the drain of its node, which may repair it.  A
    # worker that drains and is evicted goes on draining within its grace period, as any that is
    # evicted; nothing could keep its node longer than that.
    return {
        **bound,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


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
