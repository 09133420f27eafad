"""Common parts of every rendered object: metadata, owner, names, selectors and parts of pods."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_schema.labels import (
    CLUSTER,
    COMPONENT,
    ETCD,
    POOL,
    REVISION,
    ROLE,
    TEMPLATE,
    cluster_labels,
    workload_labels,
)
from pdcluster_schema.pdcluster import KIND
from pdcluster_schema.stock_engine import STOCK
from pdcluster_schema.workload import WorkloadId

Manifest = dict[str, Any]

OWNER_API_VERSION = "pdcluster.io/v1alpha1"
ETCD_CLIENT_PORT, ETCD_PEER_PORT = 2379, 2380
TOLERATION_SECONDS = 30  # of a lost node, where Kubernetes gives 300 by default
USER = 65532  # the images' own user; neither workers nor etcd ever run as root

# Folders of a worker pod's files
ENGINE_FOLDER = "/etc/pdcluster/engine"
POLICY_FOLDER = "/etc/pdcluster/policy"
TLS_FOLDER = "/etc/pdcluster/tls"
ETCD_TLS_FOLDER = "/etc/pdcluster/etcd-tls"
API_KEYS_FOLDER = "/etc/pdcluster/api-keys"
KV_STORE_FOLDER = "/etc/pdcluster/kv-store"
ENGINE_FILE, POLICY_FILE, LOGGING_FILE = "engine.yaml", "policy.yaml", "vllm-logging.json"


@dataclass(frozen=True)
class RenderSettings:
    # for a revision whose spec names none; resolved by the caller and kept in the record
    worker_image: str
    etcd_image: str  # for a managed etcd whose spec names none
    operator_namespace: str  # from where the operator asks a managed etcd
    cluster_domain: str = "cluster.local"  # in which the members of a managed etcd have their names
    # likewise, beside a stock engine: our server process alone; empty = the worker image, which has
    # it as well
    server_image: str = ""

    def worker_image_for(self, engine_type: str) -> str:
        return (self.server_image if engine_type in STOCK else "") or self.worker_image


@dataclass(frozen=True)
class Owner:
    name: str
    namespace: str
    uid: str


def new_object(
    kind: str, name: str, owner: Owner, labels: Mapping[str, str], **parts: Any
) -> Manifest:
    """An object of the owner's namespace, removed with its owner.

    kind:  apiVersion and kind in one, as in apps/v1/StatefulSet
    parts: everything but metadata (spec, data, ...), and `annotations`
    """
    api_version, _, kind_name = kind.rpartition("/")
    annotations = parts.pop("annotations", None)
    metadata: Manifest = {"name": name, "namespace": owner.namespace, "labels": dict(labels)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    metadata["ownerReferences"] = [owner_reference(owner)]
    return {"apiVersion": api_version, "kind": kind_name, "metadata": metadata, **parts}


def shared_object(kind: str, name: str, owner: Owner, **parts: Any) -> Manifest:
    return new_object(kind, name, owner, cluster_labels(owner.name, "ingress"), **parts)


def etcd_object(kind: str, name: str, owner: Owner, **parts: Any) -> Manifest:
    return new_object(kind, name, owner, cluster_labels(owner.name, ETCD), **parts)


def owner_reference(owner: Owner) -> Manifest:
    """The controller reference.  It does not block the owner's deletion: that would need a right
    over the PDCluster's finalizers, and there is none to wait for.
    """
    return {
        "apiVersion": OWNER_API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def workload_selector(workload: WorkloadId) -> dict[str, str]:
    """Labels that only this workload's pods have."""
    return {
        CLUSTER: workload.cluster,
        ROLE: workload.role,
        POOL: workload.pool,
        REVISION: workload.revision,
        **({TEMPLATE: workload.template} if workload.template else {}),
    }


def labels_of(workload: WorkloadId, role: str | None = None) -> dict[str, str]:
    """`workload_labels` of it; role: of its followers"""
    return workload_labels(
        *(workload.cluster, role or workload.role, workload.pool),
        *(workload.revision, workload.template),
    )


def workers_selector(cluster: str) -> Manifest:
    """Label selector of all workers of a cluster, of every revision; its etcd has no role."""
    return {
        "matchLabels": {CLUSTER: cluster},
        "matchExpressions": [{"key": ROLE, "operator": "Exists"}],
    }


def etcd_selector(owner: Owner) -> dict[str, str]:
    return {CLUSTER: owner.name, COMPONENT: ETCD}


@dataclass(frozen=True)
class ChildNames:
    service_account: str  # of the pods
    authority: str  # Secret with the CA and its key
    certificates: str  # Secret that workers mount
    policy: str  # ConfigMap with the policy file, and beside it the conditions


def child_names(cluster: str) -> ChildNames:
    pods = f"{cluster}-pdc"
    return ChildNames(pods, f"{pods}-ca", f"{pods}-tls", f"{cluster}-policy")


def policy_name(cluster: str) -> str:
    return f"{cluster}-pdc"


def headless(selector: Mapping[str, str], port: Manifest) -> Manifest:
    """Spec of a Service that gives pods their names, ready or not."""
    return {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [port],
    }


def pod_base(cluster: str, grace_seconds: int, selector: Mapping[str, str]) -> Manifest:
    """Spec of a pod of our user, whose group owns the pod's own volumes, spread over nodes."""
    return {
        "serviceAccountName": child_names(cluster).service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # a large volume is not walked again at every start
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector},
            }
        ],
    }


def node_tolerations() -> list[Manifest]:
    """For how long a pod stays on a node that no longer answers."""
    return [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": TOLERATION_SECONDS,
        }
        for taint in ("not-ready", "unreachable")
    ]


def container_security() -> Manifest:
    """securityContext without privileges, and without writing outside of volumes."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def container_port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def http_probe(port: str, path: str, period_seconds: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def field_variables(fields: Mapping[str, str]) -> list[Manifest]:
    """Variables of a container with fields of its pod.  fields: path by variable"""
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
