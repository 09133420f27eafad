"""The snapshot of each workload, here called its record: made once, and from then on the only
source of its StatefulSet and engine file.

Pure.  So a new operator, another default image or a hand-edited child change
nothing that runs.  A record that was deleted is made again: from what runs, if
it runs, else from the spec, if it is still the workload's revision.  A pool that
was removed and added under its name with another gpu, or whose gpu is defined
otherwise now, is a new workload of the same name: the old one has to be gone
first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.observe import Live, workload_of
from pdcluster_api.manifests.objects import new_object
from pdcluster_api.manifests.render import (
    Owner,
    image_of_record,
    is_of_pool,
    pool_of_engine,
    render_record,
)
from pdcluster_api.schema.labels import workload_labels
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.revision import revision_of
from pdcluster_api.schema.sections import PoolSpec
from pdcluster_api.schema.workload import WorkloadId
from pdcluster_operator.reconcile.older_names import names_of_revision

WORKER = "worker"


@dataclass(frozen=True)
class Snapshots:
    """The snapshots that one PDCluster has, or that can be made from what runs."""

    cluster: PDCluster
    live: Live
    owner: Owner

    def is_missing(self, workload: WorkloadId) -> bool:
        """Return whether it would have to be rendered from the spec."""
        return self._found(workload) is None and self._of_what_runs(workload) is None

    def outdated(self) -> frozenset[WorkloadId]:
        """Workloads of the newest revision that were made for a pool as it is no longer
        declared.
        """
        return frozenset(
            workload
            for workload, pool in self._declared().items()
            if (record := self._found(workload) or self._of_what_runs(workload))
            and not is_of_pool(record, self.cluster, pool)
        )

    def _declared(self) -> Mapping[WorkloadId, PoolSpec]:
        """The workloads of the newest revision, with their pools."""
        name, revision = self.cluster.metadata.name, revision_of(self.cluster.spec)
        roles = self.cluster.spec.roles.present()
        return {
            WorkloadId(name, role, pool.name, revision): pool
            for role, spec in roles.items()
            for pool in spec.pools
        }

    def _found(self, workload: WorkloadId) -> Body | None:
        return self.live.own("ControllerRevision").get(workload.name)

    def _of_what_runs(self, workload: WorkloadId) -> Body | None:
        """From a StatefulSet and engine file that have lost their record; the API server's defaults
        in it change nothing.
        """
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
    """Sources of the snapshots of one PDCluster, the spec included.

    default_image:          of a new revision that names none
    has_client_certificate: whether the etcd's TLS Secret has a client certificate; None = not known
                            yet, and no snapshot can be made
    """

    default_image: str
    has_client_certificate: bool | None

    def of(self, workload: WorkloadId) -> Body | None:
        """The snapshot of a workload; None when it cannot be made now."""
        return self._found(workload) or self._of_what_runs(workload) or self._new(workload)

    def _new(self, workload: WorkloadId) -> Body | None:
        if self.has_client_certificate is None or workload not in self._declared():
            return None
        image = self.cluster.spec.image.name or next(
            self._images(workload.revision), self.default_image
        )
        names = names_of_revision(
            workload.cluster, self.live.own("ControllerRevision").values(), workload.revision
        )
        return render_record(
            self.cluster,
            workload,
            self.owner,
            image,
            etcd_client_certificate=self.has_client_certificate,
            names=names,
        )

    def _images(self, revision: str) -> Iterator[str]:
        """Snapshots of the revision's other workloads: all of one revision run the same."""
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
