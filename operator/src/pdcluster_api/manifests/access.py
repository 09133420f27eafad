"""NetworkPolicies (ingress only), the ServiceAccount and the TLS Secrets of a cluster."""

import base64
from collections.abc import Mapping

from pdcluster_api.manifests.objects import (
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    Manifest,
    Owner,
    child_names,
    etcd_policy_name,
    new_object,
    policy_name,
    workers_selector,
)
from pdcluster_schema.labels import CLUSTER, COMPONENT, ETCD, cluster_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import (
    GRPC_PORT,
    HTTP_PORT,
    KV_PORT,
    NUM_KV_PORTS,
    NUM_UCX_PORTS,
)

_KV_PORTS: Manifest = {
    "port": KV_PORT,
    "endPort": KV_PORT + NUM_KV_PORTS + NUM_UCX_PORTS - 1,
    "protocol": "TCP",
}

_KIND = "networking.k8s.io/v1/NetworkPolicy"


def workers_policy(owner: Owner, *, has_stock_engines: bool = False) -> Manifest:
    """HTTP from anywhere (clients, probes, Prometheus); gRPC and KV from this cluster's workers.
    has_stock_engines: any port from them, since a stock engine moves KV over ports of its choice
    """
    workers = workers_selector(owner.name)
    peers: Manifest = {"from": [{"podSelector": workers}]}
    if not has_stock_engines:
        peers["ports"] = [*_ports(GRPC_PORT), _KV_PORTS]
    rules = [{"ports": _ports(HTTP_PORT)}, peers]
    return new_object(
        _KIND,
        policy_name(owner.name),
        owner,
        cluster_labels(owner.name, "ingress"),
        spec=_spec(workers, rules),
    )


def etcd_policy(owner: Owner, operator_namespace: str) -> Manifest:
    """Clients are this cluster's workers and the operator; members reach each other."""
    members = {"matchLabels": {CLUSTER: owner.name, COMPONENT: ETCD}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}}
    }
    rules = [
        {
            "ports": _ports(ETCD_CLIENT_PORT),
            "from": [{"podSelector": workers_selector(owner.name)}, operator],
        },
        {"ports": _ports(ETCD_PEER_PORT), "from": [{"podSelector": members}]},
    ]
    return new_object(
        _KIND,
        etcd_policy_name(owner.name),
        owner,
        cluster_labels(owner.name, ETCD),
        spec=_spec(members, rules),
    )


def _spec(pods: Manifest, rules: list[Manifest]) -> Manifest:
    return {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}


def _ports(*numbers: int) -> list[Manifest]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def service_account(cluster: PDCluster, owner: Owner) -> Manifest:
    """Without a mounted token; with the pull secrets, which the etcd's image needs too."""
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


_NO_ANNOTATIONS: Mapping[str, str] = {}


def render_tls_secrets(
    owner: Owner,
    ca: Mapping[str, bytes],
    tls: Mapping[str, bytes],
    *,
    ca_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
    tls_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
) -> tuple[Manifest, Manifest]:
    """The authority's and the workers', to be written in this order.  ca: tls.crt and tls.key of
    the authority, PEM tls: ca.crt (every authority that is accepted), tls.crt and tls.key of the
    workers, PEM
    """
    names = child_names(owner.name)
    return _secret(owner, names.authority, ca, ca_annotations), _secret(
        owner, names.certificates, tls, tls_annotations
    )


def _secret(
    owner: Owner, name: str, content: Mapping[str, bytes], annotations: Mapping[str, str]
) -> Manifest:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    labels = cluster_labels(owner.name, "ingress")
    return new_object(
        "v1/Secret",
        name,
        owner,
        labels,
        annotations=annotations,
        type="kubernetes.io/tls",
        data=data,
    )
