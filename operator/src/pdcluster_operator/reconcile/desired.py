"""From a plan to manifests: everything of a cluster that should exist.  Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pdcluster_operator.api.conditions import APPLY_FAILED
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.api.workload import WorkloadId
from pdcluster_operator.cluster.converge import ObjectName
from pdcluster_operator.cluster.differences import Manifest
from pdcluster_operator.manifests.render import Capabilities, Owner, Site, render_scaler, render_shared, render_workload
from pdcluster_operator.plan.state import ClusterPlan, Failure, ScalerPlan
from pdcluster_operator.reconcile.records import Records


@dataclass(frozen=True)
class Rendering:
    """What the manifests of one PDCluster are made of.

    ending: workloads whose StatefulSet has to wait until the pods of an earlier one have ended
    """

    cluster: PDCluster
    owner: Owner
    site: Site
    capabilities: Capabilities
    records: Records
    ending: Collection[WorkloadId] = ()

    def manifests(self, plan: ClusterPlan) -> list[Manifest]:
        """Everything but the Secrets."""
        shared = render_shared(
            self.cluster,
            self.owner,
            self.site,
            self.capabilities,
            plan.serving,
            serving_role=plan.serving_role,
            records=self.records.live.own("ControllerRevision").values(),
        )
        return [*shared, *self._workloads(plan), *(render_scaler_of(self.owner, scaler) for scaler in plan.scalers)]

    def stranded(self, plan: ClusterPlan) -> list[WorkloadId]:
        """Planned workloads that run, and of which too much is lost to make their manifests: nothing of them may be touched."""
        outdated, running = self.records.outdated(), self.records.live.own("StatefulSet")
        found = [workload.id for workload in plan.workloads if workload.id not in outdated and workload.id.name in running]
        return [workload for workload in found if self.records.of(workload) is None]

    def _workloads(self, plan: ClusterPlan) -> Iterable[Manifest]:
        outdated = self.records.outdated()
        for workload in plan.workloads:
            record = None if workload.id in outdated else self.records.of(workload.id)
            if record is not None:
                yield record
                stateful_set, engine = render_workload(record, workload.replicas, self.owner)
                yield from [engine] if workload.id in self.ending else [stateful_set, engine]


def objects_of(workload: WorkloadId) -> list[ObjectName]:
    """All that a workload has under its name."""
    return [ObjectName(kind, workload.name) for kind in ("StatefulSet", "ControllerRevision", "ConfigMap")]


def record_lost(workload: WorkloadId) -> Failure:
    """What the status says of a stranded workload."""
    message = "its record and its engine file are lost and cannot be made again now: it is left as it is, and no new pod of it can start"
    fix = "let the roll out end, or change a setting, so that others take its place"
    return Failure(f"StatefulSet {workload.name}", APPLY_FAILED, f"{message}; {fix}")


def render_scaler_of(owner: Owner, scaler: ScalerPlan) -> Manifest:
    """The scaler as far as it is the operator's: its replicas only when they are to be written."""
    manifest = render_scaler(owner, scaler.role, scaler.pool, scaler.request or 0, scaler.seen)
    if scaler.request is None:
        del manifest["spec"]["replicas"]
    return manifest
