"""A managed etcd. One member in memory is a Deployment, which replaces a lost node's pod at once;
three are a StatefulSet with volumes. Either is recorded like a worker's: a newer operator restarts
no etcd.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pdcluster_api.manifests.access import etcd_policy
from pdcluster_api.manifests.etcd_pod import etcd_claims, etcd_pod, peers_name
from pdcluster_api.manifests.objects import (
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    Manifest,
    Owner,
    RenderSettings,
    new_object,
)
from pdcluster_api.manifests.service import etcd_budget
from pdcluster_schema.labels import CLUSTER, COMPONENT, ETCD, cluster_labels
from pdcluster_schema.pdcluster import PDCluster

_HASH_LENGTH = 8


def render_etcd(
    cluster: PDCluster, owner: Owner, site: RenderSettings, records: Iterable[Mapping[str, Any]]
) -> tuple[Manifest, ...]:
    """All objects of the managed etcd, its record first.  records: live ControllerRevisions"""
    etcd = cluster.spec.discovery.etcd
    if etcd.endpoints:
        return ()
    name = etcd_record_name(cluster)
    live = next((record for record in records if record["metadata"]["name"] == name), None)
    is_deployment = etcd.storage is None
    field = "deployment" if is_deployment else "statefulSet"
    make = _deployment if is_deployment else _stateful_set
    data = live["data"] if live else {field: {"spec": make(cluster, owner, site)}}
    labels = cluster_labels(owner.name, ETCD)
    return (
        new_object("apps/v1/ControllerRevision", name, owner, labels, revision=1, data=data),
        new_object(
            "apps/v1/Deployment" if is_deployment else "apps/v1/StatefulSet",
            f"{owner.name}-etcd",
            owner,
            labels,
            spec=data[field]["spec"],
        ),
        _client_service(owner),
        *([] if is_deployment else [_peer_service(owner)]),
        *([etcd_budget(owner)] if etcd.replicas > 1 else []),
        *(
            [etcd_policy(owner, site.operator_namespace)]
            if cluster.spec.network_policy.enabled
            else []
        ),
    )


def etcd_record_name(cluster: PDCluster) -> str:
    """Name of the record of the managed etcd as the spec asks for it; another spec is another
    record.  Values that are the default do not count, so that an operator that knows one more field
    finds the record again.
    """
    etcd = cluster.spec.discovery.etcd
    # of a StatefulSet in memory, which an older operator made, the name is another one
    kind = {"kind": "Deployment"} if etcd.storage is None else {}
    spec = json.dumps({**etcd.model_dump(exclude_defaults=True), **kind}, sort_keys=True)
    return (
        f"{cluster.metadata.name}-etcd-{hashlib.sha256(spec.encode()).hexdigest()[:_HASH_LENGTH]}"
    )


def _deployment(cluster: PDCluster, owner: Owner, site: RenderSettings) -> Manifest:
    return {
        "replicas": 1,
        # the old one goes first: two beside each other would each have some of the workers
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": _selector(owner)},
        "template": etcd_pod(cluster, owner, site, _pod_labels(owner)),
    }


def _stateful_set(cluster: PDCluster, owner: Owner, site: RenderSettings) -> Manifest:
    etcd = cluster.spec.discovery.etcd
    spec: Manifest = {
        "replicas": etcd.replicas,
        "serviceName": peers_name(owner.name),
        "podManagementPolicy": "Parallel",  # members of a new cluster wait for each other
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": _selector(owner)},
        "template": etcd_pod(cluster, owner, site, _pod_labels(owner)),
    }
    if etcd.storage is not None:  # without any it is a Deployment
        spec["volumeClaimTemplates"] = etcd_claims(etcd.storage, cluster_labels(owner.name, ETCD))
        spec["persistentVolumeClaimRetentionPolicy"] = {
            "whenDeleted": "Retain" if etcd.storage.retain else "Delete",
            "whenScaled": "Delete",
        }
    return spec


def _selector(owner: Owner) -> dict[str, str]:
    return {CLUSTER: owner.name, COMPONENT: ETCD}


def _pod_labels(owner: Owner) -> dict[str, str]:
    """Labels of another application than the workers, whose Service selects by that name."""
    return {**cluster_labels(owner.name, ETCD), "app.kubernetes.io/name": "etcd"}


def _client_service(owner: Owner) -> Manifest:
    spec = {
        "type": "ClusterIP",
        "selector": _selector(owner),
        "ports": [_port("client", ETCD_CLIENT_PORT)],
    }
    return new_object(
        "v1/Service", f"{owner.name}-etcd", owner, cluster_labels(owner.name, ETCD), spec=spec
    )


def _peer_service(owner: Owner) -> Manifest:
    """Names for the members, which must find each other before any of them is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selector(owner),
        "ports": [_port("peer", ETCD_PEER_PORT)],
    }
    return new_object(
        "v1/Service", peers_name(owner.name), owner, cluster_labels(owner.name, ETCD), spec=spec
    )


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
