"""The snapshot of each workload (its record): made once, then the only source of its StatefulSet
and engine file, so that a new operator or default image changes nothing that runs. Pure. One that
was deleted is made again from what runs, else from the spec of the same revision.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.apiserver.kinds import Body
from pdcluster_api.apiserver.observe import Live, workload_of
from pdcluster_api.manifests.objects import new_object
from pdcluster_api.manifests.render import (
    Owner,
    hashed_record,
    image_of_record,
    is_of_pool,
    pool_of_engine,
    render_record,
)
from pdcluster_schema.labels import TEMPLATE_HASH, workload_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of, template_hash, written_names
from pdcluster_schema.sections import ROUTER, PoolSpec
from pdcluster_schema.workload import WorkloadId

WORKER = "worker"


@dataclass(frozen=True)
class Snapshots:
    """The snapshots that one PDCluster has, or that can be made from what runs."""

    cluster: PDCluster
    live: Live
    owner: Owner

    def is_missing(self, workload: WorkloadId) -> bool:
        """Return whether it would have to be rendered from the spec."""
        return self._known(workload) is None

    def outdated(self) -> frozenset[WorkloadId]:
        """Workloads of the newest revision whose pool is declared otherwise now."""
        return frozenset(
            workload
            for workload, pool in self._declared().items()
            if (record := self._known(workload))
            and not is_of_pool(record, self.cluster, workload.role, pool)
        )

    def _declared(self) -> Mapping[WorkloadId, PoolSpec]:
        name, revision = self.cluster.metadata.name, revision_of(self.cluster.spec)
        roles = self.cluster.spec.roles.present()
        return {
            WorkloadId(name, role, pool.name, revision): pool
            for role, spec in roles.items()
            for pool in spec.pools
        }

    def _known(self, workload: WorkloadId) -> Body | None:
        """The snapshot that there is; of a workload that has lost it, as what runs says.  Declared
        routers without one are made from the spec.
        """
        found = self._found(workload)
        if found is not None or (workload.role == ROUTER and workload in self._declared()):
            return found
        return self._of_what_runs(workload)

    def _found(self, workload: WorkloadId) -> Body | None:
        if workload.role != ROUTER:
            return self.live.own("ControllerRevision").get(workload.name)
        found = self._routers(workload)
        if workload not in self._declared():
            return next(iter(found), None)
        hashed = template_hash(self.cluster.spec, ROUTER)
        # an older operator had routers in the revision: they are as declared if that is unchanged
        is_unchanged = workload.revision in written_names(self.cluster.spec)
        hashes = (hashed, None) if is_unchanged else (hashed,)
        return next(
            (
                each
                for expected in hashes
                for each in found
                if each["metadata"]["labels"].get(TEMPLATE_HASH) == expected
            ),
            None,
        )

    def _routers(self, workload: WorkloadId) -> list[Body]:
        records = sorted(self.live.own("ControllerRevision").items())
        return [record for _, record in records if workload_of(record) == workload]

    def _of_what_runs(self, workload: WorkloadId) -> Body | None:
        """From StatefulSet and engine file; the API server's defaults in it change nothing."""
        running = self.live.own("StatefulSet").get(workload.name)
        engine = self.live.own("ConfigMap").get(workload.name)
        if running is None or engine is None:
            return None
        marks = workload_labels(workload.cluster, workload.role, workload.pool, workload.revision)
        data = {
            "image": _image(running),
            "pool": pool_of_engine(engine),
            "statefulSet": {
                "metadata": {"labels": marks},
                "spec": {key: value for key, value in running["spec"].items() if key != "replicas"},
            },
            "engineConfig": {"metadata": {"labels": marks}, "data": engine["data"]},
        }
        return new_object(
            "apps/v1/ControllerRevision", workload.name, self.owner, marks, revision=1, data=data
        )


@dataclass(frozen=True)
class Records(Snapshots):
    """Sources of the snapshots of one PDCluster, the spec included."""

    default_image: str  # of a new revision that names none
    # whether the etcd's TLS Secret has a client certificate; None = not known yet, and no snapshot
    # can be made
    has_client_certificate: bool | None

    def of(self, workload: WorkloadId) -> Body | None:
        """The snapshot of a workload; None when it cannot be made now."""
        record = self._known(workload) or self._new(workload)
        if record is None or workload.revision != revision_of(self.cluster.spec):
            return record
        return hashed_record(record, template_hash(self.cluster.spec, workload.role))

    def _new(self, workload: WorkloadId) -> Body | None:
        if self.has_client_certificate is None or workload not in self._declared():
            return None
        image = self.cluster.spec.image.name or next(
            self._images(workload.revision), self.default_image
        )
        return render_record(
            self.cluster,
            workload,
            self.owner,
            image,
            etcd_client_certificate=self.has_client_certificate,
        )

    def _images(self, revision: str) -> Iterator[str]:
        for _, record in sorted(self.live.own("ControllerRevision").items()):
            found = workload_of(record)
            if found is not None and found.revision == revision:
                yield image_of_record(record)


def _image(stateful_set: Body) -> str:
    containers: list[dict[str, Any]] = stateful_set["spec"]["template"]["spec"]["containers"]
    image: str = next((each for each in containers if each["name"] == WORKER), containers[0])[
        "image"
    ]
    return image
