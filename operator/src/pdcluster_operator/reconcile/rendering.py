"""From a plan to manifests: everything of a cluster that should exist.  Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pdcluster_api.apiserver.observe import Live, workload_of
from pdcluster_api.manifests.render import (
    Owner,
    RenderSettings,
    render_scaler,
    render_shared,
    render_workload,
)
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan, ScalerPlan
from pdcluster_operator.reconcile.records import Records
from pdcluster_operator.writes.actions import ObjectName
from pdcluster_operator.writes.drift import Manifest
from pdcluster_schema.conditions import APPLY_FAILED
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId


@dataclass(frozen=True)
class Rendering:
    """Inputs of the manifests of one PDCluster."""

    cluster: PDCluster
    owner: Owner
    site: RenderSettings
    records: Records
    # workloads whose StatefulSet waits until the pods of an earlier one have ended
    ending: Collection[WorkloadId] = ()

    def manifests(self, plan: ClusterPlan) -> Iterator[Manifest]:
        """Everything but the Secrets, each rendered when it is asked for."""
        yield from render_shared(
            self.cluster,
            self.owner,
            self.site,
            plan.serving,
            serving_role=plan.serving_role,
            records=self.records.live.own("ControllerRevision").values(),
            budgets=plan.budgets,
        )
        yield from self._workloads(plan)
        for scaler in plan.scalers:
            yield render_scaler_of(self.owner, scaler)

    def unrenderable(self, plan: ClusterPlan) -> list[WorkloadId]:
        """Running workloads that lack too much for their manifests: they are left alone."""
        outdated, running = self.records.outdated(), self.records.live.own("StatefulSet")
        found = [
            workload.id
            for workload in plan.workloads
            if workload.id not in outdated and _is_kept(running.get(workload.id.name))
        ]
        return [workload for workload in found if self.records.of(workload) is None]

    def _workloads(self, plan: ClusterPlan) -> Iterator[Manifest]:
        outdated = self.records.outdated()
        for workload in plan.workloads:
            record = None if workload.id in outdated else self.records.of(workload.id)
            if record is not None:
                yield record
                stateful_set, engine = render_workload(record, workload.replicas, self.owner)
                yield from [engine] if workload.id in self.ending else [stateful_set, engine]


def objects_of(workload: WorkloadId) -> list[ObjectName]:
    return [
        ObjectName(kind, workload.name)
        for kind in ("StatefulSet", "ControllerRevision", "ConfigMap")
    ]


def worker_sets(live: Live) -> list[ObjectName]:
    """The StatefulSets of workers, which is not that of etcd."""
    return [
        ObjectName("StatefulSet", name)
        for name, body in live.own("StatefulSet").items()
        if workload_of(body)
    ]


def record_lost(workload: WorkloadId, cluster: PDCluster) -> WriteFailure:
    message = (
        "its record and its engine file are lost and cannot be made again now: it is left as it "
        "is, and no new pod of it can start"
    )
    return WriteFailure(
        f"StatefulSet {workload.name}", APPLY_FAILED, f"{message}; {_fix(workload, cluster)}"
    )


def _fix(workload: WorkloadId, cluster: PDCluster) -> str:
    spec, tls_secret = (
        cluster.spec.roles.present().get(workload.role),
        cluster.spec.discovery.etcd.tls_secret,
    )
    if workload.revision != revision_of(cluster.spec):
        return "let the roll out end, or change a setting, so that others take its place"
    if spec is None or all(pool.name != workload.pool for pool in spec.pools):
        return "it goes when all declared pools of its role are ready"
    return (
        f"make sure that Secret {tls_secret} of discovery.etcd.tlsSecret exists and that the "
        "operator may read it"
    )


def _is_kept(stateful_set: Manifest | None) -> bool:
    return stateful_set is not None and "deletionTimestamp" not in stateful_set["metadata"]


def render_scaler_of(owner: Owner, scaler: ScalerPlan) -> Manifest:
    """The scaler as far as it is the operator's: its replicas only when they are to be written."""
    manifest = render_scaler(owner, scaler.role, scaler.pool, scaler.request or 0, scaler.seen)
    if scaler.request is None:
        del manifest["spec"]["replicas"]
    return manifest
