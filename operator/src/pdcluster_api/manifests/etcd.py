"""A managed etcd. One member in memory is a Deployment, which replaces a lost node's pod at once;
three are a StatefulSet with volumes. Either is recorded like a worker's: a newer operator restarts
no etcd.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.manifests.access import etcd_budget, etcd_policy
from pdcluster_api.manifests.objects import (
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    Manifest,
    Owner,
    RenderSettings,
    container_port,
    container_security,
    etcd_object,
    etcd_selector,
    field_variables,
    headless,
    http_probe,
    node_tolerations,
    pod_base,
)
from pdcluster_schema.labels import ETCD, cluster_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.service import EtcdSpec, StorageSpec

DATA_FOLDER = "/var/lib/etcd"
MIN_QUOTA_MIB = 128  # what is never compacted away shows early
# A record is a kilobyte or two, written every half minute, and each version is kept for ten
# minutes: some 40 KiB, and an index beside it
QUOTA_KIB_OF_WORKER = 64
LOGS_MIB = 192  # two write-ahead logs of 64 MB each, and a snapshot
PROCESS_MIB = 192
CPU_LIMIT = "1"  # a quota may ask every container for one; far above what leases of a cell take
_VOLUME = "data"
_HASH_LENGTH = 8


def render_etcd(
    cluster: PDCluster, owner: Owner, site: RenderSettings, records: Iterable[Mapping[str, Any]]
) -> tuple[Manifest, ...]:
    """All objects of the managed etcd, its record first.  records: live ControllerRevisions"""
    etcd = cluster.spec.discovery.etcd
    if etcd.endpoints:
        return ()
    record, name = etcd_record_name(cluster), f"{owner.name}-etcd"
    live = next((each for each in records if each["metadata"]["name"] == record), None)
    is_deployment = etcd.storage is None
    field, kind = ("deployment", "Deployment") if is_deployment else ("statefulSet", "StatefulSet")
    data = live["data"] if live else {field: {"spec": _workload(cluster, owner, site)}}
    client = {
        "type": "ClusterIP",
        "selector": etcd_selector(owner),
        "ports": [_service_port("client", ETCD_CLIENT_PORT)],
    }
    found = [
        etcd_object("apps/v1/ControllerRevision", record, owner, revision=1, data=data),
        etcd_object(f"apps/v1/{kind}", name, owner, spec=data[field]["spec"]),
        etcd_object("v1/Service", name, owner, spec=client),
    ]
    if not is_deployment:  # members must find each other before any of them is ready
        peers = headless(etcd_selector(owner), _service_port("peer", ETCD_PEER_PORT))
        found.append(etcd_object("v1/Service", _peers_name(owner), owner, spec=peers))
    if etcd.replicas > 1:
        found.append(etcd_budget(owner))
    if cluster.spec.network_policy.enabled:
        found.append(etcd_policy(owner, site.operator_namespace))
    return tuple(found)


def etcd_record_name(cluster: PDCluster) -> str:
    """Name of the record of the managed etcd as the spec asks for it; another spec is another
    record.  Values that are the default do not count, so that an operator that knows one more field
    finds the record again.
    """
    etcd = cluster.spec.discovery.etcd
    # of a StatefulSet in memory, which an older operator made, the name is another one
    kind = {"kind": "Deployment"} if etcd.storage is None else {}
    spec = json.dumps({**etcd.model_dump(exclude_defaults=True), **kind}, sort_keys=True)
    digest = hashlib.sha256(spec.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{cluster.metadata.name}-etcd-{digest}"


def _workload(cluster: PDCluster, owner: Owner, site: RenderSettings) -> Manifest:
    """Spec of the Deployment, or of the StatefulSet."""
    etcd = cluster.spec.discovery.etcd
    rest: Manifest = {
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": etcd_selector(owner)},
        "template": _pod(cluster, owner, site),
    }
    if etcd.storage is None:
        # the old one goes first: two beside each other would each have some of the workers
        rolling = {"maxSurge": 0, "maxUnavailable": 1}
        strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
        return {"replicas": 1, "strategy": strategy, **rest}
    return {
        "replicas": etcd.replicas,
        "serviceName": _peers_name(owner),
        "podManagementPolicy": "Parallel",  # members of a new cluster wait for each other
        "updateStrategy": {"type": "RollingUpdate"},
        **rest,
        "volumeClaimTemplates": [_claim(etcd.storage, cluster_labels(owner.name, ETCD))],
        "persistentVolumeClaimRetentionPolicy": {
            "whenDeleted": "Retain" if etcd.storage.retain else "Delete",
            "whenScaled": "Delete",
        },
    }


def _service_port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}


def _peers_name(owner: Owner) -> str:
    return f"{owner.name}-etcd-peers"


@dataclass(frozen=True)
class EtcdSizes:
    """Sizes of a member, in MiB: of its database, of a volume in memory, of the container."""

    quota: int
    volume: int
    limit: int

    @classmethod
    def for_workers(cls, workers: int) -> "EtcdSizes":
        """Sizes that so many workers need.

        >>> EtcdSizes.for_workers(100), EtcdSizes.for_workers(4096)
        (EtcdSizes(quota=128, volume=320, limit=512), EtcdSizes(quota=256, volume=448, limit=640))
        """
        quota = max(MIN_QUOTA_MIB, workers * QUOTA_KIB_OF_WORKER // 1024)
        return cls(quota, quota + LOGS_MIB, quota + LOGS_MIB + PROCESS_MIB)


def _pod(cluster: PDCluster, owner: Owner, site: RenderSettings) -> Manifest:
    etcd = cluster.spec.discovery.etcd
    pools = (pool for role in cluster.spec.roles.present().values() for pool in role.pools)
    sizes = EtcdSizes.for_workers(sum(pool.max_replicas or pool.replicas for pool in pools))
    # of another application than the workers, whose Service selects by that name
    labels = {**cluster_labels(owner.name, ETCD), "app.kubernetes.io/name": "etcd"}
    spec = {
        **pod_base(owner.name, 30, labels),
        "containers": [_container(etcd, owner, site, sizes)],
    }
    if etcd.storage is None:
        # Not on the node's disk: after the node's restart it would find a log that was cut off, in
        # memory it starts afresh.
        # Short, since nothing is lost with the pod: workers register again in the next one.
        spec["tolerations"] = node_tolerations()
        spec["volumes"] = [
            {"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{sizes.volume}Mi"}}
        ]
    return {"metadata": {"labels": labels}, "spec": spec}


def _claim(storage: StorageSpec, labels: dict[str, str]) -> Manifest:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(storage.size)}},
    }
    if storage.class_name is not None:
        spec["storageClassName"] = storage.class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": _VOLUME, "labels": labels},
        "spec": spec,
    }


def _container(etcd: EtcdSpec, owner: Owner, site: RenderSettings, sizes: EtcdSizes) -> Manifest:
    flags = {
        # a folder below the volume, which etcd makes for itself alone
        "data-dir": f"{DATA_FOLDER}/member",
        # Go listens on the addresses of both families here, wherever there are both.
        "listen-client-urls": f"http://0.0.0.0:{ETCD_CLIENT_PORT}",
        "initial-cluster-state": "new",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "10m",
        "max-wals": "1",
        "log-level": "warn",
        "initial-cluster-token": owner.uid,  # a namesake of later days is another cluster
        **_places(etcd, owner, site),
        "quota-backend-bytes": str(sizes.quota << 20),
    }
    peer_ports = [] if etcd.storage is None else [container_port("peer", ETCD_PEER_PORT)]
    return {
        "name": "etcd",
        "image": etcd.image or site.etcd_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["etcd", *(f"--{flag}={value}" for flag, value in flags.items())],
        "env": field_variables({"POD_NAME": "metadata.name"}),
        "ports": [container_port("client", ETCD_CLIENT_PORT), *peer_ports],
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"cpu": CPU_LIMIT, "memory": f"{sizes.limit}Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": _VOLUME, "mountPath": DATA_FOLDER}],
        # A member without a quorum, or without room, is alive: to restart it would bring neither
        # back.  /health is 503 for both.
        "startupProbe": http_probe("client", "/livez", 2, 60),
        "readinessProbe": http_probe("client", "/readyz", 5, 2),
        "livenessProbe": http_probe("client", "/livez", 10, 6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _places(etcd: EtcdSpec, owner: Owner, site: RenderSettings) -> dict[str, str]:
    services = f"{owner.namespace}.svc.{site.cluster_domain}"
    if etcd.storage is None:
        name, host, client = "etcd", "127.0.0.1", f"{owner.name}-etcd.{services}"
        peer, members = host, f"etcd=http://{host}:{ETCD_PEER_PORT}"
    else:
        domain = f"{_peers_name(owner)}.{services}"
        name, host = "$(POD_NAME)", "0.0.0.0"
        client = peer = f"$(POD_NAME).{domain}"
        pods = [f"{owner.name}-etcd-{ordinal}" for ordinal in range(etcd.replicas)]
        members = ",".join(f"{pod}=http://{pod}.{domain}:{ETCD_PEER_PORT}" for pod in pods)
    return {
        "name": name,
        "listen-peer-urls": f"http://{host}:{ETCD_PEER_PORT}",
        "advertise-client-urls": f"http://{client}:{ETCD_CLIENT_PORT}",
        "initial-advertise-peer-urls": f"http://{peer}:{ETCD_PEER_PORT}",
        "initial-cluster": members,
    }
