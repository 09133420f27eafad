"""The pod of a worker, with the user's templates over it. Files are mounted as folders, so that a
change of policy or certificate reaches a running worker.
"""

from typing import Any

from pdcluster_api.manifests.engine_config import (
    API_KEYS_FOLDER,
    ENGINE_FILE,
    ENGINE_FOLDER,
    ETCD_TLS_FOLDER,
    POLICY_FILE,
    POLICY_FOLDER,
    TLS_FOLDER,
    requires_keys,
)
from pdcluster_api.manifests.engine_container import (
    SHARED_MEMORY as ENGINE_SHARED_MEMORY,
)
from pdcluster_api.manifests.engine_container import engine_container, engine_volumes
from pdcluster_api.manifests.model_source import ModelSource, model_source
from pdcluster_api.manifests.objects import Manifest, child_names, container_security, pod_security
from pdcluster_api.manifests.placement import placement_of, with_accelerator
from pdcluster_api.manifests.pod_template import with_templates
from pdcluster_schema.labels import GPU, GPUS_PER_REPLICA
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import GRPC_PORT, HTTP_PORT, KV_PORT
from pdcluster_schema.sections import ROUTER, PoolSpec, RoleSpec
from pdcluster_schema.vllm_engine import VLLM
from pdcluster_schema.workload import WorkloadId

CONTAINER = "worker"
# reading hundreds of gigabytes of weights from a network volume takes this order of time
STARTUP_SECONDS = 3600
STARTUP_PERIOD_SECONDS = 5
# until every node's kube-proxy has dropped a pod that is going, connections still arrive
FORGET_SECONDS = 5
SHARED_MEMORY = "1Gi"
# Requests of the server process beside a stock engine, which has the resources of the role
SERVER_REQUESTS = {"cpu": "500m", "memory": "512Mi"}

# Size for a worker's compiled kernels and a download's temporary files: some GiB, and never the
# node's whole disk
_TMP = "16Gi"

_READABLE_BY_US = 0o440


def worker_pod(
    cluster: PDCluster,
    workload: WorkloadId,
    pool: PoolSpec,
    image: str,
    labels: dict[str, str],
) -> Manifest:
    """labels: those of its pods, which no template of the user's overrides"""
    rendered = {
        "metadata": {
            "labels": labels,
            "annotations": {
                "kubectl.kubernetes.io/default-container": CONTAINER,
                GPU: pool.gpu,
                GPUS_PER_REPLICA: str(cluster.spec.gpus_per_replica(workload.role, pool)),
            },
        },
        "spec": _spec(cluster, workload, pool, image),
    }
    merged = with_templates(rendered, cluster.spec, workload.role)
    return {
        **merged,
        "metadata": _marked(merged.get("metadata", {}), labels),
        "spec": with_accelerator(merged.get("spec", {}), cluster.spec.accelerator_of(pool)),
    }


def worker_model(cluster: PDCluster, role: str, image: str) -> ModelSource:
    container = _base_container(cluster, cluster.spec.roles.present()[role], image)
    return model_source(cluster.spec.model, container, weights=role != ROUTER)


def _marked(metadata: Manifest, labels: dict[str, str]) -> Manifest:
    """Our labels over the template's; anything but a map cannot be kept."""
    others = metadata.get("labels")
    return {**metadata, "labels": {**(others if isinstance(others, dict) else {}), **labels}}


def _spec(cluster: PDCluster, workload: WorkloadId, pool: PoolSpec, image: str) -> Manifest:
    model = worker_model(cluster, workload.role, image)
    files = _files(cluster, workload)
    spec: Manifest = {
        "serviceAccountName": child_names(workload.cluster).service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": cluster.spec.rollout.grace_period_seconds,
        "securityContext": pod_security(),
        **placement_of(workload, cluster.spec.accelerator_of(pool), cluster.spec.placement),
        "containers": [
            _container(cluster, workload, pool, image, [*_mounts(files), *model.mounts])
        ],
        "volumes": [*files.values(), *_scratch(SHARED_MEMORY), *model.volumes],
    }
    init_containers = list(model.init_containers)
    if has_vllm_engine(cluster, workload.role):
        init_containers.append(_engine(cluster, workload, pool, model))
        spec["volumes"] = [
            *files.values(),
            *_scratch(ENGINE_SHARED_MEMORY),
            *engine_volumes(),
            *model.volumes,
        ]
    if init_containers:
        spec["initContainers"] = init_containers
    if cluster.spec.image.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.spec.image.pull_secrets]
    return spec


def _container(
    cluster: PDCluster, workload: WorkloadId, pool: PoolSpec, image: str, mounts: list[Manifest]
) -> Manifest:
    role = cluster.spec.roles.present()[workload.role]
    base = _base_container(cluster, role, image)
    is_server = has_vllm_engine(cluster, workload.role)
    files = [
        "--engine-config",
        f"{ENGINE_FOLDER}/{ENGINE_FILE}",
        "--policy",
        f"{POLICY_FOLDER}/{POLICY_FILE}",
    ]
    return {
        **base,
        "name": CONTAINER,
        "command": ["python", "-m", "pdcluster_worker", *files],
        "env": [*_identity(), *base["env"]],
        "ports": [_port("http", HTTP_PORT), _port("grpc", GRPC_PORT), _port("kv", KV_PORT)],
        "resources": (
            {"requests": SERVER_REQUESTS}
            if is_server
            else _with_accelerators(cluster, workload, pool)
        ),
        "volumeMounts": [
            *base["volumeMounts"],
            *mounts,
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "startupProbe": _probe(
            "/ready", STARTUP_PERIOD_SECONDS, STARTUP_SECONDS // STARTUP_PERIOD_SECONDS
        ),
        "readinessProbe": _probe("/ready", 5, 2),
        "livenessProbe": _probe("/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": FORGET_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def has_vllm_engine(cluster: PDCluster, role: str) -> bool:
    return role != ROUTER and cluster.spec.engine_of(role).type == VLLM


def _engine(
    cluster: PDCluster, workload: WorkloadId, pool: PoolSpec, model: ModelSource
) -> Manifest:
    return engine_container(
        cluster,
        pool,
        cluster.spec.engine_of(workload.role),
        model.path,
        resources=_with_accelerators(cluster, workload, pool),
        mounts=model.mounts,
    )


def _with_accelerators(cluster: PDCluster, workload: WorkloadId, pool: PoolSpec) -> dict[str, Any]:
    """Resources of the role, with the accelerators of the pool: those of what computes."""
    resources = _resources(cluster.spec.roles.present()[workload.role])
    resource = cluster.spec.accelerator_of(pool).resource
    if resource:
        number = cluster.spec.gpus_per_replica(workload.role, pool)
        resources["limits"] = {**resources.get("limits", {}), resource: str(number)}
    return resources


def _base_container(cluster: PDCluster, role: RoleSpec, image: str) -> Manifest:
    """Equal resources in the worker and its init containers: the pod costs no more."""
    return {
        "image": image,
        "imagePullPolicy": cluster.spec.image.pull_policy,
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": _resources(role),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _resources(role: RoleSpec) -> dict[str, Any]:
    given = {"requests": role.resources.requests, "limits": role.resources.limits}
    return {
        kind: {name: str(amount) for name, amount in amounts.items()}
        for kind, amounts in given.items()
        if amounts
    }


def _identity() -> list[Manifest]:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
    }
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, period_seconds: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _files(cluster: PDCluster, workload: WorkloadId) -> dict[str, Manifest]:
    etcd_secret, key_secret = (
        cluster.spec.discovery.etcd.tls_secret,
        cluster.spec.service.api_key_secret,
    )
    volumes = {
        ENGINE_FOLDER: {"name": "engine", "configMap": {"name": workload.name}},
        POLICY_FOLDER: {"name": "policy", "configMap": {"name": f"{workload.cluster}-policy"}},
        TLS_FOLDER: _secret("tls", child_names(workload.cluster).certificates),
    }
    if etcd_secret is not None:
        volumes[ETCD_TLS_FOLDER] = _secret("etcd-tls", etcd_secret)
    if key_secret is not None and requires_keys(cluster, workload.role):
        volumes[API_KEYS_FOLDER] = _keys(key_secret)
    return volumes


def _secret(name: str, secret: str) -> Manifest:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": _READABLE_BY_US}}


def _keys(secret: str) -> Manifest:
    """Optional, since only then does a kubelet take the keys of a deleted Secret from running
    pods; a worker does not start without any.
    """
    volume = _secret("api-keys", secret)
    return {**volume, "secret": {**volume["secret"], "optional": True}}


def _mounts(files: dict[str, Manifest]) -> list[Manifest]:
    return [
        {"name": volume["name"], "mountPath": path, "readOnly": True}
        for path, volume in files.items()
    ]


def _scratch(shared_memory: str) -> list[Manifest]:
    """/tmp, since the root is read-only, and /dev/shm, of which a runtime gives 64 MB only."""
    memory = {"medium": "Memory", "sizeLimit": shared_memory}
    return [
        {"name": "tmp", "emptyDir": {"sizeLimit": _TMP}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
