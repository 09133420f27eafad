"""The pod of one etcd member: flags, probes, and where its data lies."""

from dataclasses import dataclass
from typing import Any

from pdcluster_api.manifests.objects import (
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    Manifest,
    Owner,
    RenderSettings,
    child_names,
    container_security,
    pod_security,
)
from pdcluster_schema.discovery import EtcdSpec, StorageSpec
from pdcluster_schema.pdcluster import PDCluster

DATA_FOLDER = "/var/lib/etcd"
MIN_QUOTA_MIB = 128  # what is never compacted away shows early
# A record is a kilobyte or two, written every half minute, and each version is kept for ten
# minutes: some 40 KiB, and an index beside it
QUOTA_KIB_OF_WORKER = 64
LOGS_MIB = 192  # two write-ahead logs of 64 MB each, and a snapshot
PROCESS_MIB = 192
TOLERATION_SECONDS = 30  # of a lost node, where Kubernetes gives 300 by default
CPU_LIMIT = "1"  # a quota may ask every container for one; far above what leases of a cell take
_VOLUME = "data"


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


def etcd_pod(
    cluster: PDCluster, owner: Owner, site: RenderSettings, labels: dict[str, str]
) -> Manifest:
    etcd, sizes = cluster.spec.discovery.etcd, EtcdSizes.for_workers(_most_workers(cluster))
    spec: Manifest = {
        "serviceAccountName": child_names(owner.name).service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": pod_security(),
        "topologySpreadConstraints": [_spread(labels)],
        "containers": [_container(etcd, owner, site, sizes)],
    }
    if etcd.storage is None:
        # Not on the node's disk: after the node's restart it would find a log that was cut off, in
        # memory it starts afresh.
        spec["tolerations"] = [_toleration(taint) for taint in ("not-ready", "unreachable")]
        spec["volumes"] = [
            {"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{sizes.volume}Mi"}}
        ]
    return {"metadata": {"labels": labels}, "spec": spec}


def etcd_claims(storage: StorageSpec, labels: dict[str, str]) -> list[Manifest]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(storage.size)}},
    }
    if storage.class_name is not None:
        spec["storageClassName"] = storage.class_name
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": _VOLUME, "labels": labels},
            "spec": spec,
        }
    ]


def peers_name(cluster: str) -> str:
    return f"{cluster}-etcd-peers"


def _most_workers(cluster: PDCluster) -> int:
    pools = (pool for role in cluster.spec.roles.present().values() for pool in role.pools)
    return sum(pool.max_replicas or pool.replicas for pool in pools)


def _container(etcd: EtcdSpec, owner: Owner, site: RenderSettings, sizes: EtcdSizes) -> Manifest:
    flags = {**_flags(), **_places(etcd, owner, site)}
    quota = {"quota-backend-bytes": str(sizes.quota << 20)}
    return {
        "name": "etcd",
        "image": etcd.image or site.etcd_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "etcd",
            *(f"--{flag}={value}" for flag, value in {**flags, **quota}.items()),
        ],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            _port("client", ETCD_CLIENT_PORT),
            *([] if etcd.storage is None else [_port("peer", ETCD_PEER_PORT)]),
        ],
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"cpu": CPU_LIMIT, "memory": f"{sizes.limit}Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": _VOLUME, "mountPath": DATA_FOLDER}],
        # A member without a quorum, or without room, is alive: to restart it would bring neither
        # back.  /health is 503 for both.
        "startupProbe": _probe("/livez", 2, 60),
        "readinessProbe": _probe("/readyz", 5, 2),
        "livenessProbe": _probe("/livez", 10, 6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _places(etcd: EtcdSpec, owner: Owner, site: RenderSettings) -> dict[str, str]:
    services = f"{owner.namespace}.svc.{site.cluster_domain}"
    domain = f"{peers_name(owner.name)}.{services}"
    members = [f"{owner.name}-etcd-{ordinal}" for ordinal in range(etcd.replicas)]
    token = {"initial-cluster-token": owner.uid}  # a namesake of later days is another cluster
    if etcd.storage is None:
        itself = f"http://127.0.0.1:{ETCD_PEER_PORT}"
        return {
            **token,
            "name": "etcd",
            "listen-peer-urls": itself,
            "advertise-client-urls": f"http://{owner.name}-etcd.{services}:{ETCD_CLIENT_PORT}",
            "initial-advertise-peer-urls": itself,
            "initial-cluster": f"etcd={itself}",
        }
    return {
        **token,
        "name": "$(POD_NAME)",
        "listen-peer-urls": f"http://0.0.0.0:{ETCD_PEER_PORT}",
        "advertise-client-urls": f"http://$(POD_NAME).{domain}:{ETCD_CLIENT_PORT}",
        "initial-advertise-peer-urls": f"http://$(POD_NAME).{domain}:{ETCD_PEER_PORT}",
        "initial-cluster": ",".join(
            f"{member}=http://{member}.{domain}:{ETCD_PEER_PORT}" for member in members
        ),
    }


def _flags() -> dict[str, str]:
    return {
        # a folder below the volume, which etcd makes for itself alone
        "data-dir": f"{DATA_FOLDER}/member",
        # Go listens on the addresses of both families here, wherever there are both.
        "listen-client-urls": f"http://0.0.0.0:{ETCD_CLIENT_PORT}",
        "initial-cluster-state": "new",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "10m",
        "max-wals": "1",
        "log-level": "warn",
    }


def _toleration(taint: str) -> Manifest:
    """Short, since nothing is lost with the pod: workers register again in the next one."""
    return {
        "key": f"node.kubernetes.io/{taint}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": TOLERATION_SECONDS,
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, period_seconds: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "client"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _spread(labels: dict[str, str]) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
