"""Short ways to render parts of a changed PDCluster."""

from collections.abc import Callable
from typing import Any

import yaml

from pdcluster_api.manifests.render import (
    Manifest,
    Owner,
    RenderSettings,
    render_record,
    render_shared,
    render_workload,
)
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.schema.object_cases import Change, minimal

OWNER = Owner("chat", "serving", "8a3c")
SITE = RenderSettings(
    worker_image="worker:1", etcd_image="etcd:1", operator_namespace="pdcluster-system"
)


def cluster_of(*changes: Change) -> PDCluster:
    """The smallest 1P1D cluster, in namespace `serving`, with changes."""
    document = minimal()
    document["metadata"]["namespace"] = OWNER.namespace
    for change in changes:
        change(document)
    return parse(document)


def workload_of(cluster: PDCluster, role: str = "decode", pool: str = "cpu") -> WorkloadId:
    """A workload of the newest revision."""
    return WorkloadId(cluster.metadata.name, role, pool, revision_of(cluster.spec))


def record_of(*changes: Change, role: str = "decode", pool: str = "cpu", **more: Any) -> Manifest:
    """The record of one workload."""
    cluster = cluster_of(*changes)
    return render_record(
        cluster, workload_of(cluster, role, pool), OWNER, SITE.worker_image, **more
    )


def pod_of(*changes: Change, role: str = "decode", pool: str = "cpu") -> Manifest:
    """The pod template of one workload."""
    template: Manifest = record_of(*changes, role=role, pool=pool)["data"]["statefulSet"]["spec"][
        "template"
    ]
    return template


def worker_of(*changes: Change, role: str = "decode", pool: str = "cpu") -> Manifest:
    """The worker's container."""
    return by_name(pod_of(*changes, role=role, pool=pool)["spec"]["containers"])["worker"]


def engine_of(*changes: Change, role: str = "decode", **more: Any) -> dict[str, Any]:
    """The engine file of one workload."""
    *_, config = render_workload(record_of(*changes, role=role, **more), 1, OWNER)
    content: dict[str, Any] = yaml.safe_load(config["data"]["engine.yaml"])
    return content


def shared_of(*changes: Change, serving: str = "0a1b2c3d") -> dict[tuple[str, str], Manifest]:
    """The shared objects by kind and name."""
    manifests = render_shared(cluster_of(*changes), OWNER, SITE, serving)
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def by_name(items: list[Manifest]) -> dict[str, Manifest]:
    """Containers, volumes or variables by their names."""
    return {item["name"]: item for item in items}


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a label selector, or a Service's plain one, selects these labels."""
    wanted = (
        selector.get("matchLabels", {})
        if "matchLabels" in selector or "matchExpressions" in selector
        else selector
    )
    expressions = selector.get("matchExpressions", [])
    holds: dict[str, Callable[[str | None, list[str]], bool]] = {
        "Exists": lambda value, _: value is not None,
        "DoesNotExist": lambda value, _: value is None,
        "In": lambda value, values: value in values,
    }
    return wanted.items() <= labels.items() and all(
        holds[each["operator"]](labels.get(each["key"]), each.get("values", []))
        for each in expressions
    )
