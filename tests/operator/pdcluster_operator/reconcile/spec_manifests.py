"""Manifests of the workloads that follow from a spec and from what runs."""

import copy
import json
from collections.abc import Collection, Iterable
from typing import Any

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_api.plan.observed.pools import DeclaredRevision
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.rendering import Records, Rendering
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.workload import Workload, WorkloadId
from tests.operator import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
SITE = RenderSettings("worker:1", "etcd:1", "system")
POOLS = {"pools": [{"name": "cpu", "replicas": 1}]}


def cluster(cpu: Any = 1, router: dict[str, Any] | None = None, **sections: Any) -> PDCluster:
    decode = {**POOLS, "resources": {"limits": {"cpu": cpu}}}
    roles = {"prefill": POOLS, "decode": decode, "router": {**POOLS, **(router or {})}}
    spec = {"model": {"name": "tiny", "path": "/models/tiny"}, "roles": roles, **sections}
    return parse(made.cluster(spec=spec))


def live(children: Iterable[made.Body]) -> Live:
    bodies = [json.loads(json.dumps(each)) for each in children]
    for body in bodies:
        body["metadata"]["uid"] = f"uid-of-{body['metadata']['name']}"
    return Live(made.cluster(), bodies)


def workloads(
    found: Live,
    spec: PDCluster,
    worker_image: str = "worker:1",
    retired: Collection[WorkloadId] = (),
) -> list[made.Body]:
    """Manifests of the workloads that follow from a spec and what there is."""
    bound = as_it_runs(spec, found)
    declared = DeclaredRevision.of(bound.spec)
    name = declared.revision
    planned = [
        Workload(declared.workload(made.NAME, role, "cpu"), 1)
        for role in ("prefill", "decode", "router")
    ]
    records = Records(bound, found, OWNER, worker_image, has_client_certificate=False)
    plan = ClusterPlan(name, "router", tuple(planned), (), tuple(retired))
    names = ("StatefulSet", "ControllerRevision", "ConfigMap")
    return [
        each
        for each in Rendering(records, SITE).manifests(plan)
        if each["kind"] in names and each["metadata"]["labels"].get("pdcluster.io/role")
    ]


def changed(before: list[made.Body], after: list[made.Body]) -> set[tuple[str, str]]:
    """Objects that differ in more than what the API server adds."""
    found: list[dict[tuple[str, str], Any]] = []
    for manifests in (before, after):
        bodies = copy.deepcopy(manifests)
        for body in bodies:
            body["metadata"].pop("uid", None)
        found.append({(body["kind"], body["metadata"]["name"]): body for body in bodies})
    one, other = found
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}
