"""A mixed cluster and its live objects, for what renders and compares them."""

import json
from typing import Any

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_schema.labels import workload_labels
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator import bodies as made
from tests.operator.pods import worker_body

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
SITE = RenderSettings("worker:1", "etcd:1", "system")


def cluster(gpu: str = "cpu", **sections: Any) -> PDCluster:
    pools = {"pools": [{"name": "first", "gpu": gpu, "replicas": 1}]}
    return parse(
        made.cluster(
            spec={
                "model": {"name": "tiny", "path": "/models/tiny"},
                "roles": {"mixed": pools},
                **sections,
            }
        )
    )


MIXED = WorkloadId(made.NAME, "mixed", "first", revision_of(cluster().spec))
LABELS = workload_labels(*(MIXED.cluster, MIXED.role, MIXED.pool, MIXED.revision))


def pod(
    ordinal: int = 0, owner: str | None = MIXED.name, kind: str = "StatefulSet", **metadata: Any
) -> made.Body:
    """A pod with the labels of the workload."""
    owners = [{"kind": kind, "name": owner, "uid": "uid-of-it", "controller": True}]
    return worker_body(MIXED, ordinal, ownerReferences=owners if owner else [], **metadata)


def live(*children: made.Body) -> Live:
    return Live(made.cluster(), [json.loads(json.dumps(child)) for child in children])
