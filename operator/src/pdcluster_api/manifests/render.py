"""The way in: everything that a PDCluster becomes on Kubernetes, for `reconcile` to bring about.

Pure: the same arguments give equal manifests.  Workloads are recorded when
they are first made (`record`), everything else follows the newest spec.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pdcluster_api.manifests.disruption_budget import workload_budget
from pdcluster_api.manifests.engine_container import has_engine_container
from pdcluster_api.manifests.etcd import etcd_record_name, render_etcd
from pdcluster_api.manifests.inference_pool import inference_pool
from pdcluster_api.manifests.network_policy import workers_policy
from pdcluster_api.manifests.objects import Manifest, Owner, RenderSettings
from pdcluster_api.manifests.policy import policy_config
from pdcluster_api.manifests.record import (
    hashed_record,
    image_of_record,
    is_of_pool,
    pool_of_engine,
    render_record,
    render_workload,
)
from pdcluster_api.manifests.scaler import render_scaler
from pdcluster_api.manifests.service import ingress_service, workers_service
from pdcluster_api.manifests.service_account import service_account
from pdcluster_api.manifests.tls_secrets import render_tls_secrets
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.vllm_engine import VLLM
from pdcluster_schema.workload import WorkloadId

__all__ = [
    "Manifest",
    "Owner",
    "RenderSettings",
    "etcd_record_name",
    "hashed_record",
    "image_of_record",
    "is_of_pool",
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
    records: Iterable[Mapping[str, Any]] = (),
    budgets: Mapping[WorkloadId, int] = NO_BUDGETS,
) -> tuple[Manifest, ...]:
    """All that the workloads of a cluster share, Secrets and scalers aside; the ingress Service
    comes last.

    serving: the revision whose workers answer
    serving_role: the role of those that do in that revision; None = as the spec has it, which a
                  roll out may be about to change
    records: the cluster's ControllerRevisions as they are; the managed etcd, its record among the
             result, is made from its own
    budgets: of each workload that serves, how many of its workers a drain of nodes has to leave
             ready
    """
    role = serving_role or cluster.spec.ingress_role
    records = list(records)
    has_stock_engines = cluster.spec.engine.type == VLLM or any(map(has_engine_container, records))
    return (
        service_account(cluster, owner),
        policy_config(cluster, owner),
        *render_etcd(cluster, owner, site, records),
        *(workload_budget(owner, workload, number) for workload, number in budgets.items()),
        *(
            [workers_policy(owner, has_stock_engines=has_stock_engines)]
            if cluster.spec.network_policy.enabled
            else []
        ),
        *(
            [inference_pool(picker, owner, serving, role)]
            if (picker := cluster.spec.service.endpoint_picker) is not None
            else []
        ),
        workers_service(owner),
        ingress_service(cluster, owner, serving, role),
    )
