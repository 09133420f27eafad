"""The state file of a run, for `pdctl status`."""

import os
from collections.abc import Sequence
from typing import Any

from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.disaggregation import disaggregation_of
from pdctl.local.plan import LocalPlan
from pdctl.local.rows import Row
from pdctl.local.run_files import RunSettings


def make_state(
    cluster: PDCluster,
    plan: LocalPlan,
    site: RunSettings,
    etcd_pid: int | None,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """etcd_pid: None where the etcd is not ours."""
    placement = cluster.spec.placement
    return {
        "name": cluster.metadata.name,
        "namespace": cluster.metadata.namespace,
        "revision": plan.revision,
        "pid": os.getpid(),
        "model": cluster.spec.model.name,
        "ingress": plan.ingress.name,
        "etcd": {"endpoints": list(site.etcd_endpoints), "pid": etcd_pid},
        "certificates": {
            "ca": str(site.certificates.ca),
            "certificate": str(site.certificates.certificate),
            "key": str(site.certificates.key),
        },
        "policy": str(site.run.policy),
        "minTransferGBps": placement.min_transfer_gbps if placement else None,
        "disaggregation": disaggregation_of(cluster, rows),
        "workers": [_worker(row) for row in rows],
    }


def _worker(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "role": row.role,
        "pool": row.pool,
        "state": row.state,
        "pid": row.pid,
        "restarts": row.num_restarts,
        "log": str(row.log),
        **{kind: row.addresses.get(kind) for kind in ("http", "grpc", "kv")},
    }
