"""The pod of a worker, with the user's templates over it. Files are mounted as folders, so that a
change of policy or certificate reaches a running worker.
"""

from typing import Any

from pdcluster_api.manifests.groups import (
    CONTAINER,
    DEFAULT_CONTAINER,
    group_variables,
    leader_template,
)
from pdcluster_api.manifests.model_source import MODELS, ModelSource, model_source
from pdcluster_api.manifests.objects import (
    API_KEYS_FOLDER,
    ENGINE_FILE,
    ENGINE_FOLDER,
    ETCD_TLS_FOLDER,
    KV_STORE_FOLDER,
    POLICY_FILE,
    POLICY_FOLDER,
    TLS_FOLDER,
    Manifest,
    child_names,
    container_port,
    container_security,
    field_variables,
    http_probe,
    pod_base,
    workload_selector,
)
from pdcluster_api.manifests.pod_template import (
    placement_of,
    with_accelerator,
    with_node_tolerations,
    with_templates,
)
from pdcluster_api.manifests.stock import stock_command, stock_environment
from pdcluster_api.manifests.vllm import IN_CONTAINER, engine_container, engine_volumes
from pdcluster_api.manifests.vllm_connectors import shared_memory
from pdcluster_api.manifests.worker_config import requires_keys
from pdcluster_schema.kv_tiers import KvTierSpec, disk_tier, password_secret
from pdcluster_schema.labels import GPU, GPUS_PER_REPLICA
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import GRACE_SECONDS, GRPC_PORT, HTTP_PORT, KV_PORT
from pdcluster_schema.quantities import canonical_quantity
from pdcluster_schema.sections import ENGINELESS, PICKER, PoolSpec, RoleSpec
from pdcluster_schema.workload import WorkloadId

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
                DEFAULT_CONTAINER: CONTAINER,
                GPU: pool.gpu,
                GPUS_PER_REPLICA: str(cluster.spec.gpus_per_replica(workload.role, pool)),
            },
        },
        "spec": _spec(cluster, workload, pool, image),
    }
    merged = with_templates(rendered, cluster.spec, workload.role)
    metadata = merged.get("metadata", {})
    others = metadata.get("labels")  # anything but a map cannot be kept
    marks = {**(others if isinstance(others, dict) else {}), **labels}
    spec = with_accelerator(merged.get("spec", {}), cluster.spec.accelerator_of(pool))
    template = {
        **merged,
        "metadata": {**metadata, "labels": marks},
        "spec": _with_grace(with_node_tolerations(spec)),
    }
    num_pods = cluster.spec.pods_per_replica(workload.role, pool)
    if num_pods == 1:
        return template
    variables = group_variables(workload, cluster.metadata.namespace, num_pods)
    return leader_template(template, variables, num_pods)


def seconds_of_sigterm(grace: int, pre_stop: int) -> int:
    """Seconds from SIGTERM to SIGKILL: a hook takes its time from the grace period, but for the
    two seconds that a kubelet leaves.

    >>> seconds_of_sigterm(30, 5), seconds_of_sigterm(5, 5)
    (25, 2)
    """
    return max(2, grace - pre_stop)


def _with_grace(spec: Manifest) -> Manifest:
    """Let the worker know of its time, which a user's template may have changed; the API server
    refuses a template that is no pod.
    """
    grace, containers = spec.get("terminationGracePeriodSeconds"), spec.get("containers")
    if not (isinstance(grace, int) and isinstance(containers, list)):
        return spec
    return {**spec, "containers": [_with_variable(each, grace) for each in containers]}


def _with_variable(container: Any, grace: int) -> Any:
    """A container of the template, and our own with its time."""
    if not isinstance(container, dict) or container.get("name") != CONTAINER:
        return container
    pre_stop: Any = container
    for name in ("lifecycle", "preStop", "sleep", "seconds"):
        pre_stop = pre_stop.get(name) if isinstance(pre_stop, dict) else None
    seconds = seconds_of_sigterm(grace, pre_stop if isinstance(pre_stop, int) else 0)
    env = container.get("env") or []
    variable = {"name": GRACE_SECONDS, "value": str(seconds)}
    return {**container, "env": [*env, variable] if isinstance(env, list) else env}


def worker_model(cluster: PDCluster, role: str, image: str) -> ModelSource:
    if role == PICKER:
        return ModelSource(MODELS)  # it reads no model
    container = _base_container(cluster, cluster.spec.roles.present()[role], image)
    return model_source(cluster.spec.model, container, weights=role not in ENGINELESS)


def _spec(cluster: PDCluster, workload: WorkloadId, pool: PoolSpec, image: str) -> Manifest:
    role = cluster.spec.roles.present()[workload.role]
    pods = cluster.spec.pods_per_replica(workload.role, pool)
    model = worker_model(cluster, workload.role, image)
    files = _files(cluster, workload)
    init_containers = list(model.init_containers)
    in_memory, own_volumes = SHARED_MEMORY, list[Manifest]()
    if has_engine := _has_stock_engine(cluster, workload.role):
        engine = cluster.spec.engine_of(workload.role)
        in_memory, own_volumes = shared_memory(engine, pods), engine_volumes()
        init_containers.append(
            engine_container(
                cluster,
                pool,
                engine,
                command=stock_command(cluster, pool, engine, model.path, IN_CONTAINER),
                variables=stock_environment(pool, engine, IN_CONTAINER, role.startup_seconds),
                resources=_with_accelerators(cluster, workload, pool),
                mounts=model.mounts,
            )
        )
    mounts = [
        *(
            {"name": each["name"], "mountPath": path, "readOnly": True}
            for path, each in files.items()
        ),
        *model.mounts,
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if (tier := _disk_tier(cluster, workload.role)) is not None:
        mounts.append({"name": "kv-tier", "mountPath": tier.path})
        own_volumes = [{"name": "kv-tier", "emptyDir": {"sizeLimit": _tier_limit(tier.size or 0)}}]
    resources = (
        {"requests": SERVER_REQUESTS} if has_engine else _with_accelerators(cluster, workload, pool)
    )
    base = _base_container(cluster, role, image)
    spec: Manifest = {
        **pod_base(
            workload.cluster,
            cluster.spec.rollout.grace_period_seconds,
            workload_selector(workload),
        ),
        **placement_of(
            workload,
            cluster.spec.accelerator_of(pool),
            # each worker of several pods has a domain of its own (`groups.group_sets`)
            cluster.spec.placement if pods == 1 else None,
        ),
        **_claims(role),
        "containers": [_container(base, resources, mounts, role)],
        "volumes": [*files.values(), *_scratch(role, in_memory), *own_volumes, *model.volumes],
    }
    if init_containers:
        spec["initContainers"] = init_containers
    if cluster.spec.image.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.spec.image.pull_secrets]
    return spec


def _claims(role: RoleSpec) -> Manifest:
    claims = [each.model_dump(by_alias=True, exclude_none=True) for each in role.resource_claims]
    return {"resourceClaims": claims} if claims else {}


def _container(
    base: Manifest, resources: Manifest, mounts: list[Manifest], role: RoleSpec
) -> Manifest:
    identity = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
    }
    ports = {"http": HTTP_PORT, "grpc": GRPC_PORT, "kv": KV_PORT}
    return {
        **base,
        "name": CONTAINER,
        "command": [
            "python",
            "-m",
            "pdcluster_worker",
            "--engine-config",
            f"{ENGINE_FOLDER}/{ENGINE_FILE}",
            "--policy",
            f"{POLICY_FOLDER}/{POLICY_FILE}",
        ],
        "env": [*field_variables(identity), *base["env"]],
        "ports": [container_port(name, number) for name, number in ports.items()],
        "resources": resources,
        "volumeMounts": [*base["volumeMounts"], *mounts],
        "startupProbe": http_probe(
            "http",
            "/ready",
            STARTUP_PERIOD_SECONDS,
            -(-role.startup_seconds // STARTUP_PERIOD_SECONDS),
        ),
        "readinessProbe": http_probe("http", "/ready", 5, 2),
        "livenessProbe": http_probe("http", "/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": FORGET_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _has_stock_engine(cluster: PDCluster, role: str) -> bool:
    return role not in ENGINELESS and cluster.spec.engine_of(role).is_stock


def _with_accelerators(cluster: PDCluster, workload: WorkloadId, pool: PoolSpec) -> dict[str, Any]:
    """Resources of what computes: of the role, with its claims and the pool's accelerators."""
    role = cluster.spec.roles.present()[workload.role]
    resources: dict[str, Any] = _resources(role)
    if role.resource_claims:
        resources["claims"] = [{"name": claim.name} for claim in role.resource_claims]
    resource = cluster.spec.accelerator_of(pool).resource
    if resource:
        spec = cluster.spec
        number = spec.gpus_per_replica(workload.role, pool) // spec.pods_per_replica(
            workload.role, pool
        )
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


def _files(cluster: PDCluster, workload: WorkloadId) -> dict[str, Manifest]:
    """Volumes with files, by the folder where they are mounted."""
    etcd_secret = cluster.spec.discovery.etcd.tls_secret
    key_secret = cluster.spec.service.api_key_secret
    names = child_names(workload.cluster)
    volumes = {
        ENGINE_FOLDER: {"name": "engine", "configMap": {"name": workload.name}},
        POLICY_FOLDER: {"name": "policy", "configMap": {"name": names.policy}},
        TLS_FOLDER: _secret("tls", names.certificates),
    }
    if etcd_secret is not None:
        volumes[ETCD_TLS_FOLDER] = _secret("etcd-tls", etcd_secret)
    if key_secret is not None and requires_keys(cluster, workload.role):
        # Optional, since only then does a kubelet take the keys of a deleted Secret from running
        # pods; a worker does not start without any.
        volumes[API_KEYS_FOLDER] = _secret("api-keys", key_secret, optional=True)
    if workload.role not in ENGINELESS:
        engine = cluster.spec.engine_of(workload.role)
        if (secret := password_secret(engine.kv_tiers)) is not None:
            volumes[KV_STORE_FOLDER] = _secret("kv-store", secret)
    return volumes


def _secret(name: str, secret: str, **options: bool) -> Manifest:
    source = {"secretName": secret, "defaultMode": _READABLE_BY_US, **options}
    return {"name": name, "secret": source}


def _disk_tier(cluster: PDCluster, role: str) -> KvTierSpec | None:
    return None if role in ENGINELESS else disk_tier(cluster.spec.engine_of(role).kv_tiers)


def _tier_limit(size: int) -> str:
    """With room for what a file system takes itself: a pod that is over the limit is evicted."""
    return f"{-(-size // 2**20) + 64}Mi"


def _scratch(role: RoleSpec, shared_memory: str) -> list[Manifest]:
    """/tmp, since the root is read-only, and /dev/shm, of which a runtime gives 64 MB only."""
    if role.shared_memory is not None:
        shared_memory = str(canonical_quantity(role.shared_memory))
    memory = {"medium": "Memory", "sizeLimit": shared_memory}
    return [
        {"name": "tmp", "emptyDir": {"sizeLimit": _TMP}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
