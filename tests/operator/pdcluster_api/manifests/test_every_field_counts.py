"""Every field of the spec changes what is rendered, or is read by the planner alone."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from pdcluster_api import manifests, plan
from pdcluster_api.manifests.render import render_record, render_shared
from pdcluster_operator import reconcile
from pdcluster_schema import rollout
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import RoleSpec
from tests.operator.pdcluster_api.manifests.field_values import ENGINE_VALUES
from tests.operator.pdcluster_api.manifests.rendering import OWNER, SITE, cluster_of, workload_of
from tests.schema.object_cases import Change, at, both, no_change, vllm

HUB = at("spec.model", {"name": "tiny", "huggingFace": {"repo": "a/b"}})
CLAIM = at("spec.model", {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models"}})
OWN_ETCD = at("spec.discovery.etcd", {"endpoints": ["a:1"]})
STORED = at("spec.discovery.etcd.storage", {"size": "1Gi"})
SARATHI = at("spec.engine.scheduler", "sarathi")
CHUNKS = both(
    SARATHI,
    at("spec.engine.chunkSchedule", {"low": 32, "high": 128, "stages": 4, "maxTokens": 512}),
)
ONE_CLASS = at(
    "spec.routing.prefillQueue.latencyClasses", [{"priority": 1, "windowMilliseconds": 1}]
)
PLACED = at("spec.placement", {"domainLabel": "rack"})
GROUPED = both(
    at("spec.roles.decode.engine", {"dataParallelSize": 2}),
    at("spec.roles.decode.pools.0.podsPerReplica", 2),
)
TIERED = at("spec.engine.kvTiers", [{"type": "disk", "size": "1Gi", "path": "/kv"}])
SERVED = at(
    "spec.engine.kvTiers",
    [{"type": "host", "size": "1Gi"}, {"type": "shared", "url": "redis://kv:6379"}],
)
STOCK = vllm(env=[{"name": "A", "value": "1"}])
ADAPTED = at("spec.model.adapters", [{"name": "sql", "path": "/sql"}])
ALLOWED = at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "1Gi"})
OF_HUB = at("spec.model.adapters", [{"name": "sql", "huggingFace": {"repo": "org/sql"}}])
OFFLOADED = both(
    at("spec.roles.prefill.pools.0.gpu", "H100"),
    at("spec.roles.decode.pools.0.gpu", "H100"),
    vllm(kvTransfer={"offload": {"memory": "1Gi"}}),
)
PICKED = at("spec.service.endpointPicker", {"name": "picker"})
ROUTED: Change = at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]})
POOL = "spec.roles.decode.pools.0"
CLAIMS = "spec.roles.decode.resourceClaims"
CLAIMED = at(CLAIMS, [{"name": "a", "resourceClaimTemplateName": "a"}])
FIELD_CHANGES = yaml.safe_load(Path(__file__).with_name("field_changes.yaml").read_text())
WHOLE = ("service.annotations", "podTemplate")

PLANNED = {
    "rollout.strategy": "the order in which workloads exist",
    "rollout.maxSurge": "how many workers a step takes forward",
    "rollout.maxUnavailable": "how many workers may be missing in a step",
    "rollout.onFailure": "what a roll out does where a gate fails",
    "rollout.bakeSeconds": "how long a gate takes",
    "rollout.minRequests": "from when latencies count for a gate",
    "rollout.whenUnknown": "what a gate does without facts",
    "rollout.progressDeadlineSeconds": "when a new revision is given up",
    "rollout.drainTimeoutSeconds": "how long a workload waits before it shrinks",
    "roles.pools.replicas": "the size of a workload, seeded into its scaler",
    "roles.pools.minReplicas": "a bound of that",
    "roles.pools.maxReplicas": "a bound of that",
    "roles.pools.flexible": "whether the autoscaler may give its workers the other role",
    "image.name": "resolved by the caller",
    "engine.kvTransfer.connector": "vLLM has no other one that keeps what is promised",
    "placement.minTransferGBps": "what a verified transfer is judged by",
    "accelerators.memoryBytes": "the decode capacity of a worker",
    "accelerators.fp8Flops": "the prefill capacity of a worker that computes in FP8",
    "accelerators.fp4Flops": "the same of FP4",
    "accelerators.pricePerHour": "metrics, and what autoscale compares pools by",
    "autoscale": "its fields have a test of their own below",
}

OF_A_PLAN = {  # numbers for a plan before there is an object
    "accelerators.linkBytes": "ranks of a worker, and KV within a domain of links",
    "accelerators.networkBytes": "KV between nodes",
}

DELAYER: dict[str, Any] = ENGINE_VALUES["prefillDelayer"]
SPECULATION: dict[str, Any] = ENGINE_VALUES["speculation"]
SECTIONS = ("prefillDelayer", "speculation")


MODELS = at("spec.service.models", [{"name": "a", "cluster": "small"}])
SMALLER = at("spec.qos.degradation.smallerModel", {"name": "small"})
KEYS = at("spec.service.apiKeySecret", "keys")
TENANT: dict[str, Any] = {
    "priority": "low",
    "requestsPerSecond": 2.5,
    "maxConcurrentRequests": 4,
    "tokensPerMinute": 1000,
}

OWN_TYPE = both(
    at(f"{POOL}.gpu", "X1"),
    at("spec.accelerators", {"X1": {"bandwidthBytes": 10**12, "bf16Flops": 10**14}}),
)

BEFORE: dict[str, Change] = {  # what is there before a field, or the fields of a section, change
    "model.pvc": CLAIM,
    "model.huggingFace": HUB,
    "model.nodeCache": HUB,
    "engine.image": STOCK,
    "engine.command": STOCK,
    "engine.args": STOCK,
    "engine.allowUnknownVersion": STOCK,
    "engine.tbtSloMilliseconds": SARATHI,
    "engine.chunkSchedule": CHUNKS,
    "routing.relaying.enabled": ROUTED,
    "qos.degradation.smallerModel": SMALLER,
    "qos.estimation.lateGroups": at(
        "spec.qos.estimation", {"estimator": "rwt", "allowClientDeadline": True}
    ),
    "qos.estimation.rejectUnmeetable": at("spec.qos.estimation.estimator", "rwt"),
    "discovery.etcd.tlsSecret": OWN_ETCD,
    "discovery.etcd.replicas": STORED,
    "discovery.etcd.storage": STORED,
    "service.endpointPicker": PICKED,
    "routing.racing.models": MODELS,
    "placement": PLACED,
}


def plain_fields(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each field of field_changes.yaml."""
    for name, value in values.items():
        at_field = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and at_field not in WHOLE:
            yield from plain_fields(value, at_field)
        else:
            yield at_field, value


def before_of(path: str) -> Change:
    return BEFORE.get(path) or BEFORE.get(path.rpartition(".")[0], no_change)


CASES: dict[str, tuple[Change, Change]] = {  # what is there before, and the change
    **{
        path: (before_of(path), at(f"spec.{path}", value))
        for path, value in plain_fields(FIELD_CHANGES)
    },
    "accelerators.resource": (
        at(f"{POOL}.gpu", "H100"),
        at("spec.accelerators", {"H100": {"resource": "x.io/gpu"}}),
    ),
    "accelerators.nodeLabels": (
        at(f"{POOL}.gpu", "H100"),
        at("spec.accelerators", {"H100": {"nodeLabels": {"a": "b"}}}),
    ),
    "accelerators.bandwidthBytes": (
        OWN_TYPE,
        at("spec.accelerators.X1.bandwidthBytes", 2 * 10**12),
    ),
    "accelerators.bf16Flops": (OWN_TYPE, at("spec.accelerators.X1.bf16Flops", 5 * 10**14)),
    "roles.pools.name": (no_change, at(f"{POOL}.name", "other")),
    "roles.pools.gpu": (no_change, at(f"{POOL}.gpu", "B200")),
    "roles.pools.gpusPerReplica": (at(f"{POOL}.gpu", "B200"), at(f"{POOL}.gpusPerReplica", 4)),
    "roles.pools.podsPerReplica": (
        at("spec.roles.decode.engine.dataParallelSize", 2),
        at(f"{POOL}.podsPerReplica", 2),
    ),
    "roles.pools.gpusPerPod": (
        both(
            vllm(),
            at(f"{POOL}.gpu", "B200"),
            at("spec.roles.decode.engine.tensorParallelSize", 8),
        ),
        at(f"{POOL}.gpusPerPod", 4),
    ),
    "placement.gang": (both(GROUPED, PLACED), at("spec.placement.gang", "PodGroup")),
    "placement.queue": (
        both(GROUPED, at("spec.placement", {"gang": "Volcano"})),
        at("spec.placement.queue", "gpus"),
    ),
    "roles.resources.requests": (no_change, at("spec.roles.decode.resources.requests", {"cpu": 1})),
    "roles.resources.limits": (no_change, at("spec.roles.decode.resources.limits", {"cpu": 1})),
    "roles.podTemplate": (
        no_change,
        at("spec.roles.decode.podTemplate", {"spec": {"priorityClassName": "high"}}),
    ),
    "roles.resourceClaims.name": (CLAIMED, at(f"{CLAIMS}.0.name", "b")),
    "roles.resourceClaims.resourceClaimName": (
        no_change,
        at(CLAIMS, [{"name": "a", "resourceClaimName": "a"}]),
    ),
    "roles.resourceClaims.resourceClaimTemplateName": (no_change, CLAIMED),
    "roles.sharedMemory": (no_change, at("spec.roles.decode.sharedMemory", "3Gi")),
    "roles.startupTimeoutSeconds": (no_change, at("spec.roles.decode.startupTimeoutSeconds", 60)),
    "engine.type": (no_change, vllm()),
    "model.frontend": (vllm(), at("spec.model.frontend", "engine")),
    "model.adapters.name": (ADAPTED, at("spec.model.adapters.0.name", "fr")),
    "model.adapters.path": (ADAPTED, at("spec.model.adapters.0.path", "/fr")),
    **{
        f"model.adapters.huggingFace.{name}": (
            OF_HUB,
            at(f"spec.model.adapters.0.huggingFace.{name}", "other"),
        )
        for name in ("repo", "revision", "tokenSecret")
    },
    "model.runtimeAdapters.path": (ALLOWED, at("spec.model.runtimeAdapters.path", "/other")),
    "model.runtimeAdapters.memory": (ALLOWED, at("spec.model.runtimeAdapters.memory", "2Gi")),
    "engine.kvTiers.type": (no_change, TIERED),
    "engine.kvTiers.size": (TIERED, at("spec.engine.kvTiers.0.size", "2Gi")),
    "engine.kvTiers.path": (TIERED, at("spec.engine.kvTiers.0.path", "/other")),
    "engine.kvTiers.url": (SERVED, at("spec.engine.kvTiers.1.url", "redis://other")),
    "engine.kvTiers.passwordSecret": (SERVED, at("spec.engine.kvTiers.1.passwordSecret", "kv")),
    "engine.env.name": (STOCK, at("spec.engine.env.0.name", "B")),
    "engine.env.value": (STOCK, at("spec.engine.env.0.value", "2")),
    **{
        f"engine.kvTransfer.{name}": (OFFLOADED, at(f"spec.engine.kvTransfer.{name}", value))
        for name, value in (
            ("backends", ["LIBFABRIC"]),
            ("extraConfig", {"num_threads": 2}),
            ("offload.memory", "2Gi"),
            ("offload.blocksPerChunk", 2),
            ("offload.evictionPolicy", "arc"),
        )
    },
    **{
        f"engine.{name}": (no_change, at(f"spec.engine.{name}", value))
        for name, value in ENGINE_VALUES.items()
        if name not in SECTIONS
    },
    **{
        f"engine.speculation.{name}": (
            no_change,
            at("spec.engine.speculation", {"method": "Off", name: value}),
        )
        for name, value in SPECULATION.items()
    },
    **{
        f"engine.prefillDelayer.{name}": (
            no_change,
            at("spec.engine.prefillDelayer", {"enabled": False, name: value}),
        )
        for name, value in DELAYER.items()
    },
    "engine.scheduler": (no_change, SARATHI),
    "roles.engine": (no_change, at("spec.roles.decode.engine.maxSequences", 5)),
    "routing.prefillQueue.latencyClasses.priority": (
        ONE_CLASS,
        at("spec.routing.prefillQueue.latencyClasses.0.priority", 2),
    ),
    "routing.prefillQueue.latencyClasses.windowMilliseconds": (
        ONE_CLASS,
        at("spec.routing.prefillQueue.latencyClasses.0.windowMilliseconds", 2),
    ),
    **{
        f"qos.tenants.{name}": (KEYS, at("spec.qos.tenants", {"alice": {name: value}}))
        for name, value in TENANT.items()
    },
    "discovery.etcd.endpoints": (no_change, OWN_ETCD),
    **{
        f"service.models.{name}": (MODELS, at(f"spec.service.models.0.{name}", value))
        for name, value in (("name", "b"), ("cluster", "other"), ("port", 80))
    },
}


def rendered(*changes: Change) -> str:
    """Everything of a cluster as text, with the names of revisions taken out: they change with
    anything.
    """
    cluster = cluster_of(*changes)
    pool = cluster.spec.roles.present()["decode"].pools[0].name
    workload = workload_of(cluster, "decode", pool)
    record = render_record(cluster, workload, OWNER, SITE.worker_image)
    return str((record, render_shared(cluster, OWNER, SITE, workload.revision))).replace(
        workload.revision, "REVISION"
    )


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Paths of all fields as YAML names them; the roles are one, and so are entries of lists and
    maps, and the autoscaler.
    """
    for name, field in model.model_fields.items():
        at_field = (
            path
            if name in ("prefill", "decode", "mixed", "router", "picker")
            else f"{path}.{field.alias}".lstrip(".")
        )
        below = next(_models(field.annotation), None)
        if below in (None, AutoscaleSpec) or (below is EngineSpec and model is RoleSpec):
            yield at_field
        else:
            yield from leaves(below, at_field)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


@pytest.mark.parametrize(("before", "change"), CASES.values(), ids=CASES)
def test_field_changes_what_is_rendered(before: Change, change: Change) -> None:
    assert rendered(before) != rendered(both(before, change))


def test_every_field_has_a_case_or_a_reason() -> None:
    assert set(leaves(PDClusterSpec)) == {*CASES, *PLANNED, *OF_A_PLAN}


def values(annotation: Any) -> Iterator[tuple[Any, ...]]:
    """The values of every Literal in the type of a field."""
    if get_origin(annotation) is Literal:
        yield get_args(annotation)
    else:
        for argument in get_args(annotation):
            yield from values(argument)


def sections_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and all below it."""
    yield model
    for field in model.model_fields.values():
        for below in _models(field.annotation):
            yield from sections_of(below)


def test_a_field_with_one_value_is_no_field() -> None:
    """It comes when its second value works."""
    single = [
        f"{section.__name__}.{name}"
        for section in sections_of(PDClusterSpec)
        for name, field in section.model_fields.items()
        if any(len(each) < 2 for each in values(field.annotation))
    ]

    assert single == []


def test_every_reason_for_a_field_is_one_that_the_planner_reads() -> None:
    files = [Path(rollout.__file__)]  # the planner asks it for workers of a step
    for room in (plan, manifests, reconcile):
        files += Path(room.__file__).parent.rglob("*.py")
    text = "".join(path.read_text() for path in files)
    names = {
        str(field.alias): name
        for section in sections_of(PDClusterSpec)
        for name, field in section.model_fields.items()
    }

    assert [
        path for path in PLANNED if not re.search(rf"\.{names[path.rpartition('.')[2]]}\b", text)
    ] == []


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    """Names of all fields of a section and of those below it."""
    for name, field in model.model_fields.items():
        yield name
        for below in _models(field.annotation):
            yield from fields_of(below)


def test_every_field_of_the_autoscaler_is_read_outside_of_the_api() -> None:
    text = "".join(
        path.read_text()
        for room in (plan, reconcile)
        for path in Path(room.__file__).parent.rglob("*.py")
    )

    assert [name for name in fields_of(AutoscaleSpec) if not re.search(rf"\.{name}\b", text)] == []


def test_image_is_what_the_caller_resolved() -> None:
    cluster = cluster_of()
    one, two = (
        render_record(cluster, workload_of(cluster), OWNER, image) for image in ("a:1", "a:2")
    )

    assert one != two


def test_objects_of_another_owner_differ_in_the_reference() -> None:
    mine, theirs = (
        render_shared(cluster_of(), owner, SITE, "0a1b2c3d")
        for owner in (OWNER, replace(OWNER, uid="other"))
    )

    assert all(one != other for one, other in zip(mine, theirs, strict=True))
