"""From a plan to manifests: everything of a cluster that should exist. Pure. A workload is rendered
once, into its record: then that is the only source of its StatefulSet and engine file, so that a
new operator or default image changes nothing that runs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pdcluster_api.apiserver.kinds import Body
from pdcluster_api.apiserver.observe import Live, is_retired, set_workload, workload_of
from pdcluster_api.manifests.groups import GroupRun
from pdcluster_api.manifests.objects import Manifest, labels_of, new_object
from pdcluster_api.manifests.render import (
    Owner,
    RenderSettings,
    hashed_record,
    image_of_record,
    is_of_pool,
    pool_of_engine,
    render_record,
    render_scaler,
    render_shared,
    render_workload,
)
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import ClusterPlan, ScalerPlan
from pdcluster_schema.conditions import APPLY_FAILED
from pdcluster_schema.continuation import snapshot_hashes
from pdcluster_schema.labels import RETIRED, TEMPLATE_HASH
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import (
    is_rolled_back,
    revision_of,
    template_hash,
    templates_of,
    written_names,
)
from pdcluster_schema.sections import ENGINELESS, PoolSpec
from pdcluster_schema.workload import GroupId, WorkloadId


@dataclass(frozen=True)
class Records:
    """Sources of the records of one PDCluster.  One that was deleted is made again from what runs,
    else from the spec of the same revision.
    """

    cluster: PDCluster
    live: Live
    owner: Owner
    default_image: str = ""  # of a new revision that names none
    # whether the etcd's TLS Secret has a client certificate; None = not known yet, and no record
    # can be made from the spec
    has_client_certificate: bool | None = False

    def is_missing(self, workload: WorkloadId) -> bool:
        """Return whether it would have to be rendered from the spec."""
        return self._known(workload) is None

    def outdated(self) -> frozenset[WorkloadId]:
        """Workloads of the newest revision whose pool is declared otherwise now."""
        if is_rolled_back(self.cluster.spec):
            return frozenset()  # they are of an earlier declaration
        return frozenset(
            workload
            for workload, pool in self._declared().items()
            if (record := self._known(workload))
            and not is_of_pool(record, self.cluster, workload.role, pool)
        )

    def of(self, workload: WorkloadId) -> Body | None:
        """The record of a workload; None when it cannot be made now."""
        record = self._known(workload) or self._new(workload)
        if record is not None and is_retired(record):
            record = hashed_record(record, {RETIRED: "false"})
        spec, role = self.cluster.spec, workload.role
        is_of_spec = (workload.revision, workload.template) == (
            revision_of(spec),
            templates_of(spec).get(role, ""),
        )
        is_of_spec = is_of_spec and not is_rolled_back(spec)
        if record is None or not is_of_spec or role not in spec.roles.present():
            return record
        return hashed_record(record, snapshot_hashes(spec, role))

    def retired(self, workload: WorkloadId) -> Iterator[Body]:
        """The record of a workload that others have taken the place of."""
        for record in self._recorded(workload)[:1]:
            yield hashed_record(record, {RETIRED: "true"})

    def others(self, retired: Collection[WorkloadId]) -> list[Body]:
        """The records of what runs, and that of the etcd."""
        found = self.live.own("ControllerRevision").values()
        return [record for record in found if workload_of(record) not in retired]

    def _declared(self) -> Mapping[WorkloadId, PoolSpec]:
        name, revision = self.cluster.metadata.name, revision_of(self.cluster.spec)
        templates = templates_of(self.cluster.spec)
        return {
            WorkloadId(name, role, pool.name, revision, templates.get(role, "")): pool
            for role, spec in self.cluster.spec.roles.present().items()
            for pool in spec.pools
        }

    def _known(self, workload: WorkloadId) -> Body | None:
        """The record that there is; of a workload that has lost it, as what runs says.  Declared
        routers without one are made from the spec, if that is not rolled back.
        """
        is_declared_router = (
            workload.role in ENGINELESS
            and workload in self._declared()
            and not is_rolled_back(self.cluster.spec)
        )
        found = (
            self._router(workload, is_declared=is_declared_router)
            if workload.role in ENGINELESS
            else self.live.own("ControllerRevision").get(workload.name)
        )
        return found if found is not None or is_declared_router else self._of_what_runs(workload)

    def _router(self, workload: WorkloadId, *, is_declared: bool) -> Body | None:
        found = self._recorded(workload)
        if not is_declared:
            return next(iter(found), None)
        # an older operator had routers in the revision: they are as declared if that is unchanged
        is_unchanged = workload.revision in written_names(self.cluster.spec)
        hashed = template_hash(self.cluster.spec, workload.role)
        by_hash = {each["metadata"]["labels"].get(TEMPLATE_HASH): each for each in reversed(found)}
        return by_hash.get(hashed) or (by_hash.get(None) if is_unchanged else None)

    def _recorded(self, workload: WorkloadId) -> list[Body]:
        """By their names: routers that are being replaced have several."""
        records = sorted(self.live.own("ControllerRevision").items())
        return [record for _, record in records if workload_of(record) == workload]

    def _of_what_runs(self, workload: WorkloadId) -> Body | None:
        """From StatefulSet and engine file; the API server's defaults in it change nothing."""
        running = self.live.own("StatefulSet").get(workload.name)
        engine = self.live.own("ConfigMap").get(workload.name)
        if running is None or engine is None:
            return None
        containers = running["spec"]["template"]["spec"]["containers"]
        worker = next((each for each in containers if each["name"] == "worker"), containers[0])
        marks = labels_of(workload)
        spec = {key: value for key, value in running["spec"].items() if key != "replicas"}
        data = {
            "image": worker["image"],
            "pool": pool_of_engine(engine),
            "statefulSet": {"metadata": {"labels": marks}, "spec": spec},
            "engineConfig": {"metadata": {"labels": marks}, "data": engine["data"]},
        }
        kind = "apps/v1/ControllerRevision"
        return new_object(kind, workload.name, self.owner, marks, revision=1, data=data)

    def _new(self, workload: WorkloadId) -> Body | None:
        has_certificate = self.has_client_certificate
        is_of_spec = workload in self._declared() and not is_rolled_back(self.cluster.spec)
        if has_certificate is None or not is_of_spec:
            return None
        image = self.cluster.spec.image.name or self._image(workload.revision)
        return render_record(
            self.cluster, workload, self.owner, image, etcd_client_certificate=has_certificate
        )

    def _image(self, revision: str) -> str:
        for _, record in sorted(self.live.own("ControllerRevision").items()):
            found = workload_of(record)
            if found is not None and found.revision == revision:
                return image_of_record(record)
        return self.default_image


@dataclass(frozen=True)
class Rendering:
    records: Records
    site: RenderSettings
    # workloads whose StatefulSet waits until the pods of an earlier one have ended
    ending: Collection[WorkloadId] = ()
    # of workers of several pods that are there
    runs: Mapping[GroupId, GroupRun] = field(default_factory=dict)

    def manifests(self, plan: ClusterPlan) -> Iterator[Manifest]:
        """Everything but the Secrets, each rendered when it is asked for."""
        owner, outdated = self.records.owner, self.records.outdated()
        yield from render_shared(
            self.records.cluster,
            owner,
            self.site,
            plan.serving,
            serving_role=plan.serving_role,
            is_wide=plan.is_wide,
            records=self.records.others(plan.retired),
            budgets=plan.budgets,
        )
        for workload in plan.workloads:
            record = None if workload.id in outdated else self.records.of(workload.id)
            if record is not None:
                yield record
                *sets, engine = render_workload(record, workload.replicas, owner, self.runs)
                yield from [engine] if workload.id in self.ending else [*sets, engine]
        for each in plan.retired:
            yield from self.records.retired(each)
        for scaler in plan.scalers:
            yield render_scaler_of(owner, scaler)

    def unrenderable(self, plan: ClusterPlan) -> list[WorkloadId]:
        """Running workloads that lack too much for their manifests: they are left alone."""
        outdated, running = self.records.outdated(), self.records.live.own("StatefulSet")
        kept = {
            set_workload(each)
            for each in running.values()
            if "deletionTimestamp" not in each["metadata"]
        }
        return [
            each.id
            for each in plan.workloads
            if each.id in kept and each.id not in outdated and self.records.of(each.id) is None
        ]


def record_lost(workload: WorkloadId, cluster: PDCluster) -> WriteFailure:
    message = (
        "its record and its engine file are lost and cannot be made again now: it is left as it "
        "is, and no new pod of it can start"
    )
    text = f"{message}; {_fix(workload, cluster)}"
    return WriteFailure(f"StatefulSet {workload.name}", APPLY_FAILED, text)


def _fix(workload: WorkloadId, cluster: PDCluster) -> str:
    spec = cluster.spec.roles.present().get(workload.role)
    if workload.revision != revision_of(cluster.spec):
        return "let the roll out end, or change a setting, so that others take its place"
    if spec is None or all(pool.name != workload.pool for pool in spec.pools):
        return "it goes when all declared pools of its role are ready"
    tls_secret = cluster.spec.discovery.etcd.tls_secret
    return (
        f"make sure that Secret {tls_secret} of discovery.etcd.tlsSecret exists and that the "
        "operator may read it"
    )


def render_scaler_of(owner: Owner, scaler: ScalerPlan) -> Manifest:
    """The scaler as far as it is the operator's: its replicas only when they are to be written."""
    manifest = render_scaler(owner, scaler.role, scaler.pool, scaler.request or 0, scaler.seen)
    if scaler.request is None:
        del manifest["spec"]["replicas"]
    return manifest
