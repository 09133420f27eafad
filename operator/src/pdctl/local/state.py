"""The state file of a run, with its disaggregation as the operator's condition."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_api.plan.status.disaggregating import DisaggregationReports, disaggregating
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.plan import LocalPlan
from pdctl.local.run_files import RunSettings
from pdctl.local.watcher import Row


def make_state(
    cluster: PDCluster,
    plan: LocalPlan,
    settings: RunSettings,
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
        "etcd": {"endpoints": list(settings.etcd_endpoints), "pid": etcd_pid},
        "certificates": {
            "ca": str(settings.certificates.ca),
            "certificate": str(settings.certificates.certificate),
            "key": str(settings.certificates.key),
        },
        "policy": str(settings.run.policy),
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


def disaggregation_of(cluster: PDCluster, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The condition and its figures; None for mixed workers."""
    if PREFILL not in cluster.spec.roles.present():
        return None
    threshold = cluster.spec.prefill_length_threshold
    found = disaggregating(_reports(rows), Previous({}), threshold)
    if found.condition is None:
        return None
    condition = found.condition
    words = {"status": condition.status, "reason": condition.reason, "message": condition.message}
    return {**words, **found.status}


class DisaggregationReporter:
    """Reports once when prefill and decode stop working together, and once when they resume."""

    def __init__(self, cluster: PDCluster, echo: Callable[[str], None]) -> None:
        self._cluster, self._echo = cluster, echo
        self._reported: str | None = None

    def show(self, rows: Sequence[Row]) -> None:
        found = disaggregation_of(self._cluster, rows)
        if found is None or found["status"] == "Unknown":
            return
        reason = found["reason"] if found["status"] == "False" else None
        if reason != self._reported:
            self._reported = reason
            self._echo(f"{self._cluster.metadata.name}: {found['message']}")


def _reports(rows: Sequence[Row]) -> DisaggregationReports:
    prefill = [row for row in rows if row.role == PREFILL]
    reports = {row.name: row.disaggregation for row in rows if row.disaggregation is not None}
    return DisaggregationReports(
        decode={
            row.name: reports[row.name]
            for row in rows
            if row.role != PREFILL and row.name in reports
        },
        prefill={row.name: reports[row.name] for row in prefill if row.name in reports},
        prefill_pods=frozenset(row.name for row in prefill),
        num_prefill_ready=sum(row.is_ready for row in prefill),
    )
