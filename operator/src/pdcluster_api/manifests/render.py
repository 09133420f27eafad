"""Everything that a PDCluster becomes on Kubernetes. Pure. Workloads come from their record, a
ControllerRevision that is rendered once; everything else follows the newest spec.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from pdcluster_api.manifests.access import (
    inference_pool,
    ingress_service,
    picker_service,
    render_scaler,
    render_tls_secrets,
    service_account,
    workers_policy,
    workers_service,
    workload_budget,
)
from pdcluster_api.manifests.etcd import etcd_record_name, render_etcd
from pdcluster_api.manifests.groups import (
    GroupRun,
    follower_template,
    gang_of,
    group_sets,
    placement_of_groups,
)
from pdcluster_api.manifests.objects import (
    ENGINE_FILE,
    Manifest,
    Owner,
    RenderSettings,
    labels_of,
    new_object,
    workload_selector,
)
from pdcluster_api.manifests.vllm import has_engine_container
from pdcluster_api.manifests.worker_config import engine_config, policy_config
from pdcluster_api.manifests.worker_pod import worker_model, worker_pod
from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.continuation import snapshot_hashes
from pdcluster_schema.labels import CLUSTER, POOL, REVISION, ROLE, TEMPLATE, TEMPLATE_HASH
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of, templates_of
from pdcluster_schema.sections import ENGINELESS, ROUTER, PoolSpec
from pdcluster_schema.workload import GroupId, WorkloadId, workload_name


def render_record(
    cluster: PDCluster,
    workload: WorkloadId,
    owner: Owner,
    image: str,
    *,
    etcd_client_certificate: bool = True,
) -> Manifest:
    """The ControllerRevision of a workload of the cluster's newest revision.

    image:                   the worker image, resolved
    etcd_client_certificate: whether the Secret of discovery.etcd.tlsSecret has tls.crt and tls.key
                             as well as ca.crt
    """
    assert workload.revision == revision_of(cluster.spec), (
        "a record is made of the newest spec only"
    )
    pools = cluster.spec.roles.present()[workload.role].pools
    pool = next(pool for pool in pools if pool.name == workload.pool)
    labels, hashes = labels_of(workload), snapshot_hashes(cluster.spec, workload.role)
    config = engine_config(
        cluster,
        workload.role,
        pool,
        worker_model(cluster, workload.role, image).path,
        etcd_client_certificate=etcd_client_certificate,
    )
    template = worker_pod(cluster, workload, pool, image, labels)
    data = {
        "image": image,
        "pool": _pool(cluster, workload.role, pool),
        "statefulSet": _stateful_set(workload, template),
        "engineConfig": {"metadata": {"labels": labels}, "data": config},
    }
    num_pods = cluster.spec.pods_per_replica(workload.role, pool)
    if num_pods > 1:
        followers = _stateful_set(workload, follower_template(template, workload.role))
        followers["spec"]["ordinals"] = {"start": 1}
        data["group"] = {
            "pods": num_pods,
            "followers": followers,
            **placement_of_groups(cluster.spec.placement),
            **gang_of(cluster.spec.placement),
        }
    name, marks = record_name(workload, hashes[TEMPLATE_HASH]), {**labels, **hashes}
    return new_object("apps/v1/ControllerRevision", name, owner, marks, revision=1, data=data)


def record_name(workload: WorkloadId, hashed: str) -> str:
    """hashed: `template_hash`; routers of one revision come from one snapshot after another"""
    return f"{workload.name}-{hashed}" if workload.role in ENGINELESS else workload.name


def hashed_record(record: Manifest, hashes: Mapping[str, str]) -> Manifest:
    """With the labels by which it is found, which snapshots of older operators lack."""
    metadata = record["metadata"]
    labels = {**metadata["labels"], **hashes}
    if labels == metadata["labels"]:
        return record
    return {**record, "metadata": {**metadata, "labels": labels}}


def render_workload(
    record: Mapping[str, Any],
    replicas: int,
    owner: Owner,
    runs: Mapping[GroupId, GroupRun] = MappingProxyType({}),
) -> tuple[Manifest, ...]:
    """StatefulSets and engine ConfigMap, the last, which share parts of the record.

    runs: of workers of several pods that are there
    """
    data, marks = record["data"], record["metadata"]["labels"]
    place = marks[CLUSTER], marks[ROLE], marks[POOL]
    workload = WorkloadId(*place, marks[REVISION], marks.get(TEMPLATE, ""))
    stateful_set, config = data["statefulSet"], data["engineConfig"]
    engine = new_object(
        "v1/ConfigMap",
        workload.name,
        owner,
        config["metadata"]["labels"],
        immutable=True,
        data=config["data"],
    )
    if "group" in data:
        return (*group_sets(record, workload, replicas, owner, runs), engine)
    whole = new_object(
        "apps/v1/StatefulSet",
        workload.name,
        owner,
        stateful_set["metadata"]["labels"],
        spec={"replicas": replicas, **stateful_set["spec"]},
    )
    return whole, engine


def pods_of_record(record: Mapping[str, Any]) -> int:
    """Pods of one worker."""
    number: int = ((record.get("data") or {}).get("group") or {}).get("pods", 1)
    return number


def image_of_record(record: Mapping[str, Any]) -> str:
    """As resolved when the record was made, whatever a pod template puts over it."""
    image: str = record["data"]["image"]
    return image


def is_of_pool(record: Mapping[str, Any], cluster: PDCluster, role: str, pool: PoolSpec) -> bool:
    """True if a snapshot was made for the pool as declared; a missing value is equal."""
    declared, found = _pool(cluster, role, pool), record["data"].get("pool", {})
    pods = [each.get("podsPerReplica", 1) for each in (declared, found)]
    return pods[0] == pods[1] and all(
        declared.get(name, value) == value for name, value in found.items()
    )


def pool_of_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """Pool in the snapshot of an engine ConfigMap; empty for a file that cannot be read."""
    try:
        file = yaml.safe_load(config["data"][ENGINE_FILE])
        return {"gpu": file["gpu"]}
    except (KeyError, TypeError, yaml.YAMLError):
        return {}


def _pool(cluster: PDCluster, role: str, pool: PoolSpec) -> dict[str, Any]:
    """Parts of a pool's declaration that its workers depend on, and that are not in the revision.
    Of the accelerator only the object's own definition: another one in a newer operator's table is
    for new workers.
    """
    own = cluster.spec.accelerators.get(pool.gpu)
    is_own = own is not None and (own.has_place or pool.gpu not in accelerators())
    accelerator = (
        {"resource": own.resource or "", "nodeLabels": own.node_labels} if own and is_own else {}
    )
    number, pods = (
        cluster.spec.gpus_per_replica(role, pool),
        cluster.spec.pods_per_replica(role, pool),
    )
    several = {"podsPerReplica": pods} if pods > 1 else {}
    return {"gpu": pool.gpu, "gpusPerReplica": number, **several, "accelerator": accelerator}


def _stateful_set(workload: WorkloadId, template: Manifest) -> Manifest:
    """Its labels, and its spec without replicas.  OnDelete: the template of a record never changes,
    so the only change that a StatefulSet could roll out is one made by hand, which is drift and
    reverted at once and must not cost a running worker. Routers hold no KV, and are replaced in
    place, one after another, when their own part of the spec changes.
    """
    strategy = "RollingUpdate" if workload.role in ENGINELESS else "OnDelete"
    marks = {name: template["metadata"]["labels"][name] for name in workload_selector(workload)}
    spec = {
        "serviceName": f"{workload.cluster}-workers",
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": strategy},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": marks},
        "template": template,
    }
    return {"metadata": {"labels": labels_of(workload, marks[ROLE])}, "spec": spec}


__all__ = [
    "Manifest",
    "Owner",
    "RenderSettings",
    "etcd_record_name",
    "hashed_record",
    "image_of_record",
    "is_of_pool",
    "pods_of_record",
    "pool_of_engine",
    "render_record",
    "render_scaler",
    "render_shared",
    "render_tls_secrets",
    "render_workload",
]

NO_BUDGETS: Mapping[WorkloadId, int] = MappingProxyType({})


def render_shared(
    cluster: PDCluster,
    owner: Owner,
    site: RenderSettings,
    serving: str,
    *,
    serving_role: str | None = None,
    is_wide: bool = False,
    records: Iterable[Mapping[str, Any]] = (),
    budgets: Mapping[WorkloadId, int] = NO_BUDGETS,
) -> tuple[Manifest, ...]:
    """All that the workloads of a cluster share, Secrets and scalers aside; the ingress Service
    comes last.

    serving: the revision whose workers answer; is_wide: those of all do
    serving_role: the role of those that do in that revision; None = as the spec has it, which a
                  roll out may be about to change
    records: the cluster's ControllerRevisions as they are; the managed etcd, its record among the
             result, is made from its own
    budgets: of each workload that serves, how many of its workers a drain of nodes has to leave
             ready
    """
    role, picker = serving_role or cluster.spec.ingress_role, cluster.spec.service.endpoint_picker
    records = list(records)
    templates, revision = templates_of(cluster.spec), revision_of(cluster.spec)
    pods = {
        workload_name(cluster.metadata.name, role, pool.name, templates.get(role, revision)): number
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
        if (number := cluster.spec.pods_per_replica(role, pool)) > 1
    } | {each["metadata"]["name"]: pods_of_record(each) for each in records}
    found = [
        service_account(cluster, owner),
        policy_config(cluster, owner),
        *render_etcd(cluster, owner, site, records),
        *(
            workload_budget(owner, workload, number, pods.get(workload.name, 1))
            for workload, number in budgets.items()
        ),
    ]
    if cluster.spec.network_policy.enabled:
        has_stock = cluster.spec.engine.is_stock or any(map(has_engine_container, records))
        found.append(
            workers_policy(
                owner,
                site.operator_namespace,
                has_stock_engines=has_stock,
                has_groups=any(number > 1 for number in pods.values()),
                has_pickers=cluster.spec.roles.picker is not None,
            )
        )
    selected = None if is_wide else serving
    if picker is not None:
        pooled = role
        if picker.name is None:
            found.append(picker_service(picker, owner, serving))
            if role == ROUTER:
                pooled = _decode_role(records, serving) or cluster.spec.decode_role
        found.append(inference_pool(picker, owner, selected, pooled))
    return (*found, workers_service(owner), ingress_service(cluster, owner, selected, role))


def _decode_role(records: Iterable[Mapping[str, Any]], revision: str) -> str | None:
    """Role of the workers behind the routers of a revision; None = it has none."""
    found = [each["metadata"].get("labels", {}) for each in records]
    roles = {labels.get(ROLE) for labels in found if labels.get(REVISION) == revision}
    return next((role for role in ("decode", "mixed") if role in roles), None)
