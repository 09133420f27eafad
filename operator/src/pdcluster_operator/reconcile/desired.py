"""From a plan to manifests: everything of a cluster that should exist.  Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.cluster.differences import Manifest
from pdcluster_operator.manifests.render import Capabilities, Owner, Site, render_scaler, render_shared, render_workload
from pdcluster_operator.plan.state import ClusterPlan, ScalerPlan
from pdcluster_operator.reconcile.records import Records


@dataclass(frozen=True)
class Rendering:
    """What the manifests of one PDCluster are made of."""

    cluster: PDCluster
    owner: Owner
    site: Site
    capabilities: Capabilities
    records: Records

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

    def _workloads(self, plan: ClusterPlan) -> Iterable[Manifest]:
        for workload in plan.workloads:
            record = self.records.of(workload.id)
            if record is not None:
                yield record
                yield from render_workload(record, workload.replicas, self.owner)


def render_scaler_of(owner: Owner, scaler: ScalerPlan) -> Manifest:
    """The scaler as far as it is the operator's: its replicas only when they are to be written."""
    manifest = render_scaler(owner, scaler.role, scaler.pool, scaler.request or 0, scaler.seen)
    if scaler.request is None:
        del manifest["spec"]["replicas"]
    return manifest
