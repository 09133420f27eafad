"""Every field of the spec changes what is rendered, or is read by the planner alone."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from pdcluster_api import manifests, plan
from pdcluster_api.manifests.render import render_record, render_shared
from pdcluster_operator import reconcile
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import RoleSpec
from tests.operator.pdcluster_api.manifests.field_values import ENGINE_VALUES
from tests.operator.pdcluster_api.manifests.rendering import OWNER, SITE, cluster_of, workload_of
from tests.schema.object_cases import Change, at, both, vllm

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
STOCK = vllm(env=[{"name": "A", "value": "1"}])
PICKED = at("spec.service.endpointPicker", {"name": "picker"})
ROUTED: Change = at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]})
NOTHING: Change = lambda content: None  # noqa: E731 - a change like the others
POOL = "spec.roles.decode.pools.0"

DECODE_SCORE: dict[str, Any] = {
    "policy": "kvAware",
    "temperature": 0.5,
    "kvEvents": False,
    "recentSeconds": 60.0,
    "hotspotPrevention": False,
    "hotWorkersRatio": 0.5,
    "maxShareRatio": 2.0,
    "minCacheHitRatio": 0.75,
    "sessionAffinity": False,
    "failureTaint": 2.0,
    "queueThresholdTokens": 4096,
    "allowRequestOverrides": True,
    "kvAware.overlapCredit": 0.5,
    "kvAware.prefillLoadScale": 2.0,
    "kvAware.prefillDecay": 1.0,
    "kvAware.activeRequestWeight": 1.0,
    "kvAware.trackPrefill": False,
    "capacityAware.occupancyWeight": 1.0,
    "capacityAware.activeWeight": 1.0,
    "latencyAware.kvOccupancyWeight": 1.0,
    "latencyAware.activeWeight": 2.0,
    "latencyAware.cacheMatchWeight": 1.0,
    "latencyAware.memoryBandwidthWeight": 1.0,
    "latencyAware.recentPrefixWeight": 2.0,
}

PLANNED = {
    "rollout.strategy": "the order in which workloads exist",
    "rollout.progressDeadlineSeconds": "when a new revision is given up",
    "rollout.drainTimeoutSeconds": "how long a workload waits before it shrinks",
    "roles.pools.replicas": "the size of a workload, seeded into its scaler",
    "roles.pools.minReplicas": "a bound of that",
    "roles.pools.maxReplicas": "a bound of that",
    "image.name": "resolved by the caller",
    "placement.minTransferGBps": "what a verified transfer is judged by",
    "accelerators.memoryBytes": "the decode capacity of a worker",
    "accelerators.fp8Flops": "the prefill capacity of a worker that computes in FP8",
    "accelerators.fp4Flops": "the same of FP4",
    "autoscale": "its fields have a test of their own below",
}

DELAYER: dict[str, Any] = ENGINE_VALUES["prefillDelayer"]
SPECULATION: dict[str, Any] = ENGINE_VALUES["speculation"]
SECTIONS = ("prefillDelayer", "speculation")


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

CASES: dict[str, tuple[Change, Change]] = {  # what is there before, and the change
    "model.name": (NOTHING, at("spec.model.name", "other")),
    "model.path": (NOTHING, at("spec.model.path", "/other")),
    "model.dtype": (NOTHING, at("spec.model.dtype", "float32")),
    "model.chatTemplate": (NOTHING, at("spec.model.chatTemplate", "chatml-tools")),
    "model.toolParser": (NOTHING, at("spec.model.toolParser", "hermes")),
    "model.reasoningParser": (NOTHING, at("spec.model.reasoningParser", "none")),
    "model.pvc.claimName": (CLAIM, at("spec.model.pvc.claimName", "other")),
    "model.huggingFace.repo": (HUB, at("spec.model.huggingFace.repo", "a/c")),
    "model.huggingFace.revision": (HUB, at("spec.model.huggingFace.revision", "v2")),
    "model.huggingFace.tokenSecret": (HUB, at("spec.model.huggingFace.tokenSecret", "hub")),
    "model.nodeCache": (HUB, at("spec.model.nodeCache", "/cache")),
    "image.pullPolicy": (NOTHING, at("spec.image.pullPolicy", "Never")),
    "image.pullSecrets": (NOTHING, at("spec.image.pullSecrets", ["a"])),
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
    "roles.pools.name": (NOTHING, at(f"{POOL}.name", "other")),
    "roles.pools.gpu": (NOTHING, at(f"{POOL}.gpu", "B200")),
    "roles.pools.gpusPerReplica": (at(f"{POOL}.gpu", "B200"), at(f"{POOL}.gpusPerReplica", 4)),
    "roles.resources.requests": (NOTHING, at("spec.roles.decode.resources.requests", {"cpu": 1})),
    "roles.resources.limits": (NOTHING, at("spec.roles.decode.resources.limits", {"cpu": 1})),
    "roles.podTemplate": (
        NOTHING,
        at("spec.roles.decode.podTemplate", {"spec": {"priorityClassName": "high"}}),
    ),
    "podTemplate": (NOTHING, at("spec.podTemplate", {"spec": {"priorityClassName": "high"}})),
    "engine.type": (NOTHING, vllm()),
    "engine.image": (STOCK, at("spec.engine.image", "vllm:2")),
    "engine.command": (STOCK, at("spec.engine.command", ["python3", "-m", "vllm"])),
    "engine.args": (STOCK, at("spec.engine.args", ["--enforce-eager"])),
    "engine.env.name": (STOCK, at("spec.engine.env.0.name", "B")),
    "engine.env.value": (STOCK, at("spec.engine.env.0.value", "2")),
    **{
        f"engine.{name}": (NOTHING, at(f"spec.engine.{name}", value))
        for name, value in ENGINE_VALUES.items()
        if name not in SECTIONS
    },
    **{
        f"engine.speculation.{name}": (
            NOTHING,
            at("spec.engine.speculation", {"method": "Off", name: value}),
        )
        for name, value in SPECULATION.items()
    },
    **{
        f"engine.prefillDelayer.{name}": (
            NOTHING,
            at("spec.engine.prefillDelayer", {"enabled": False, name: value}),
        )
        for name, value in DELAYER.items()
    },
    "engine.scheduler": (NOTHING, SARATHI),
    "engine.longPrefillTokenThreshold": (NOTHING, at("spec.engine.longPrefillTokenThreshold", 100)),
    "engine.chunkedPrefill": (NOTHING, at("spec.engine.chunkedPrefill", False)),
    "engine.tbtSloMilliseconds": (SARATHI, at("spec.engine.tbtSloMilliseconds", 50)),
    "engine.chunkSchedule.low": (CHUNKS, at("spec.engine.chunkSchedule.low", 64)),
    "engine.chunkSchedule.high": (CHUNKS, at("spec.engine.chunkSchedule.high", 64)),
    "engine.chunkSchedule.stages": (CHUNKS, at("spec.engine.chunkSchedule.stages", 2)),
    "engine.chunkSchedule.maxTokens": (CHUNKS, at("spec.engine.chunkSchedule.maxTokens", 1024)),
    "roles.engine": (NOTHING, at("spec.roles.decode.engine.maxSequences", 5)),
    "routing.offload.prefillLengthThreshold": (
        NOTHING,
        at("spec.routing.offload.prefillLengthThreshold", 1),
    ),
    "routing.offload.prefillQueueMax": (NOTHING, at("spec.routing.offload.prefillQueueMax", 1)),
    "routing.offload.decodeLoadThreshold": (
        NOTHING,
        at("spec.routing.offload.decodeLoadThreshold", 1),
    ),
    "routing.offload.minOffloadLength": (NOTHING, at("spec.routing.offload.minOffloadLength", 1)),
    **{
        f"routing.offload.{name}": (NOTHING, at(f"spec.routing.offload.{name}", value))
        for name, value in {
            "policy": "islBounding",
            "maxTransferMilliseconds": 20,
            "decodeBusyRatio": 0.9,
            "score.lengthWeight": 1,
            "score.queueWeight": 1,
            "score.decodeWeight": 1,
            "score.transferWeight": 1,
            "score.transferMilliseconds": 1,
            "score.minScore": 1,
            "islBounding.maxTokens": 1,
            "islBounding.maxRatio": 1,
            "prefillLoad.busyBatches": 2,
            "sloFeedback.ttftSloMilliseconds": 1,
            "sloFeedback.tpotSloMilliseconds": 1,
            "sloFeedback.minThreshold": 1,
            "sloFeedback.maxThreshold": 100,
            "sloFeedback.margin": 0.5,
        }.items()
    },
    **{
        f"routing.prefillQueue.{name}": (NOTHING, at(f"spec.routing.prefillQueue.{name}", value))
        for name, value in {
            "mode": "latencyFirst",
            "minWindowMilliseconds": 1,
            "maxWindowMilliseconds": 20,
            "minPrompts": 9,
            "maxPrompts": 33,
            "lengthBuckets": [100],
            "fastLaneTokens": 16,
        }.items()
    },
    "routing.prefillQueue.latencyClasses.priority": (
        ONE_CLASS,
        at("spec.routing.prefillQueue.latencyClasses.0.priority", 2),
    ),
    "routing.prefillQueue.latencyClasses.windowMilliseconds": (
        ONE_CLASS,
        at("spec.routing.prefillQueue.latencyClasses.0.windowMilliseconds", 2),
    ),
    "routing.prefillScore.transferWeight": (
        NOTHING,
        at("spec.routing.prefillScore.transferWeight", 2),
    ),
    "routing.prefillScore.prefixWeight": (NOTHING, at("spec.routing.prefillScore.prefixWeight", 2)),
    "routing.prefillScore.loadWeight": (NOTHING, at("spec.routing.prefillScore.loadWeight", 2)),
    "routing.credits.batchesAhead": (NOTHING, at("spec.routing.credits.batchesAhead", 3)),
    "routing.racing.enabled": (NOTHING, at("spec.routing.racing.enabled", True)),
    "routing.racing.maxRequests": (NOTHING, at("spec.routing.racing.maxRequests", 3)),
    "routing.racing.maxRatio": (NOTHING, at("spec.routing.racing.maxRatio", 0.5)),
    "routing.relaying.enabled": (ROUTED, at("spec.routing.relaying.enabled", True)),
    "routing.relaying.policy": (NOTHING, at("spec.routing.relaying.policy", "roundRobin")),
    "routing.relaying.prefixBytes": (NOTHING, at("spec.routing.relaying.prefixBytes", 256)),
    "routing.relaying.maxRetries": (NOTHING, at("spec.routing.relaying.maxRetries", 3)),
    "routing.moving.enabled": (NOTHING, at("spec.routing.moving.enabled", False)),
    "routing.moving.afterPreemptions": (NOTHING, at("spec.routing.moving.afterPreemptions", 3)),
    "routing.moving.maxMoves": (NOTHING, at("spec.routing.moving.maxMoves", 3)),
    **{
        f"routing.decodeScore.{path}": (NOTHING, at(f"spec.routing.decodeScore.{path}", value))
        for path, value in DECODE_SCORE.items()
    },
    "qos.admission.maxQueuedRequests": (NOTHING, at("spec.qos.admission.maxQueuedRequests", 1)),
    "qos.admission.maxQueuedTokens": (NOTHING, at("spec.qos.admission.maxQueuedTokens", 1)),
    "qos.admission.maxBodyBytes": (NOTHING, at("spec.qos.admission.maxBodyBytes", 1)),
    "qos.admission.workerWaitSeconds": (NOTHING, at("spec.qos.admission.workerWaitSeconds", 1.0)),
    "qos.slo.ttftMilliseconds": (NOTHING, at("spec.qos.slo.ttftMilliseconds", 300)),
    "qos.slo.tpotMilliseconds": (NOTHING, at("spec.qos.slo.tpotMilliseconds", 50)),
    "qos.earlyRejection.enabled": (NOTHING, at("spec.qos.earlyRejection.enabled", True)),
    "qos.earlyRejection.rejectOnSloViolation": (
        NOTHING,
        at("spec.qos.earlyRejection.rejectOnSloViolation", False),
    ),
    "qos.highPriority.offloadAtOnce": (NOTHING, at("spec.qos.highPriority.offloadAtOnce", True)),
    "qos.lowPriority.thresholdMilliseconds": (
        NOTHING,
        at("spec.qos.lowPriority.thresholdMilliseconds", 500),
    ),
    "qos.lowPriority.pastThreshold": (NOTHING, at("spec.qos.lowPriority.pastThreshold", "Demote")),
    "qos.lowPriority.prefillWorkers": (
        NOTHING,
        at("spec.qos.lowPriority.prefillWorkers", "Barred"),
    ),
    "qos.degradation.atPressure": (NOTHING, at("spec.qos.degradation.atPressure", 0.5)),
    "qos.degradation.maxTokens": (NOTHING, at("spec.qos.degradation.maxTokens", 200)),
    "qos.degradation.maxPromptTokens": (NOTHING, at("spec.qos.degradation.maxPromptTokens", 1000)),
    "qos.degradation.smallerModel.name": (
        SMALLER,
        at("spec.qos.degradation.smallerModel.name", "tiny"),
    ),
    "qos.degradation.smallerModel.url": (
        SMALLER,
        at("spec.qos.degradation.smallerModel.url", "http://tiny"),
    ),
    **{
        f"qos.tenantDefaults.{name}": (NOTHING, at(f"spec.qos.tenantDefaults.{name}", value))
        for name, value in TENANT.items()
    },
    **{
        f"qos.tenants.{name}": (KEYS, at("spec.qos.tenants", {"alice": {name: value}}))
        for name, value in TENANT.items()
    },
    "qos.estimation.estimator": (NOTHING, at("spec.qos.estimation.estimator", "loadAware")),
    "qos.estimation.allowClientDeadline": (
        NOTHING,
        at("spec.qos.estimation.allowClientDeadline", True),
    ),
    "qos.estimation.rejectUnmeetable": (
        at("spec.qos.estimation.estimator", "rwt"),
        at("spec.qos.estimation.rejectUnmeetable", True),
    ),
    "qos.estimation.sloGranularitySeconds": (
        NOTHING,
        at("spec.qos.estimation.sloGranularitySeconds", 5),
    ),
    "qos.estimation.presetTokenMilliseconds": (
        NOTHING,
        at("spec.qos.estimation.presetTokenMilliseconds", 9.5),
    ),
    "qos.estimation.presetOutputTokens": (
        NOTHING,
        at("spec.qos.estimation.presetOutputTokens", 100),
    ),
    "qos.stallSeconds": (NOTHING, at("spec.qos.stallSeconds", 120)),
    "qos.allowClientPriority": (NOTHING, at("spec.qos.allowClientPriority", True)),
    "discovery.etcd.endpoints": (NOTHING, OWN_ETCD),
    "discovery.etcd.tlsSecret": (OWN_ETCD, at("spec.discovery.etcd.tlsSecret", "tls")),
    "discovery.etcd.replicas": (STORED, at("spec.discovery.etcd.replicas", 3)),
    "discovery.etcd.image": (NOTHING, at("spec.discovery.etcd.image", "etcd:2")),
    "discovery.etcd.storage.size": (STORED, at("spec.discovery.etcd.storage.size", "2Gi")),
    "discovery.etcd.storage.className": (
        STORED,
        at("spec.discovery.etcd.storage.className", "fast"),
    ),
    "discovery.etcd.storage.retain": (STORED, at("spec.discovery.etcd.storage.retain", True)),
    "service.port": (NOTHING, at("spec.service.port", 80)),
    "service.type": (NOTHING, at("spec.service.type", "NodePort")),
    "service.annotations": (NOTHING, at("spec.service.annotations", {"a": "b"})),
    "service.apiKeySecret": (NOTHING, at("spec.service.apiKeySecret", "keys")),
    "service.sharedPrefixCache": (NOTHING, at("spec.service.sharedPrefixCache", True)),
    **{
        f"service.cors.{name}": (NOTHING, at(f"spec.service.cors.{name}", value))
        for name, value in {
            "allowedOrigins": ["https://a.example"],
            "allowedMethods": ["POST"],
            "allowedHeaders": ["authorization"],
            "allowCredentials": True,
            "maxAgeSeconds": 5,
        }.items()
    },
    **{
        f"service.limits.{name}": (NOTHING, at(f"spec.service.limits.{name}", value))
        for name, value in {
            "maxHeaderBytes": 8192,
            "maxHeaders": 64,
            "headerSeconds": 5,
            "bodySeconds": 20,
            "keepAliveSeconds": 30,
        }.items()
    },
    "service.endpointPicker.name": (PICKED, at("spec.service.endpointPicker.name", "other")),
    "service.endpointPicker.port": (PICKED, at("spec.service.endpointPicker.port", 9003)),
    "service.endpointPicker.failureMode": (
        PICKED,
        at("spec.service.endpointPicker.failureMode", "FailOpen"),
    ),
    "placement.domainLabel": (PLACED, at("spec.placement.domainLabel", "zone")),
    "placement.mode": (PLACED, at("spec.placement.mode", "Required")),
    "rollout.gracePeriodSeconds": (NOTHING, at("spec.rollout.gracePeriodSeconds", 60)),
    "networkPolicy.enabled": (NOTHING, at("spec.networkPolicy.enabled", False)),
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
            if name in ("prefill", "decode", "mixed", "router")
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
    assert set(leaves(PDClusterSpec)) == {*CASES, *PLANNED}


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
    text = "".join(
        path.read_text()
        for room in (plan, manifests, reconcile)
        for path in Path(room.__file__).parent.rglob("*.py")
    )
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
