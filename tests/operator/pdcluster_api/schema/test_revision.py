"""The revision: what gives a cluster new pods, and what never does."""

from typing import Any

import pytest
from pydantic import Field

from pdcluster_api.schema.engine import EngineSpec
from pdcluster_api.schema.load import parse
from pdcluster_api.schema.pdcluster import PDClusterSpec
from pdcluster_api.schema.revision import revision_of
from tests.operator.object_cases import CPU, HUB, Change, at, both, minimal, without

ENDPOINTS = at("spec.discovery.etcd.endpoints", ["etcd:2379"])

ROLLS: dict[str, Change] = {
    "model": at("spec.model.dtype", "float32"),
    "template of the model": at("spec.model.chatTemplate", "chatml-tools"),
    "parser of calls": at("spec.model.toolParser", "hermes"),
    "parser of reasoning": at("spec.model.reasoningParser", "none"),
    "source of the model": at("spec.model", HUB),
    "revision of the repository": at("spec.model", {"name": "tiny", "huggingFace": {"repo": "a/b", "revision": "v2"}}),
    "volume": at("spec.model.pvc", {"claimName": "models"}),
    "image": at("spec.image.name", "worker:2"),
    "pull policy": at("spec.image.pullPolicy", "Always"),
    "engine": at("spec.engine.blockSize", 32),
    "engine of a role": at("spec.roles.decode.engine.maxSequences", 32),
    "resources": at("spec.roles.decode.resources.limits", {"memory": "1Gi"}),
    "pod template": at("spec.podTemplate", {"spec": {"hostNetwork": True}}),
    "pod template of a role": at("spec.roles.prefill.podTemplate", {"metadata": {"labels": {"a": "b"}}}),
    "etcd of one's own": ENDPOINTS,
    "TLS of that etcd": both(ENDPOINTS, at("spec.discovery.etcd.tlsSecret", "tls")),
    "API keys": at("spec.service.apiKeySecret", "keys"),
    "placement": at("spec.placement", {"domainLabel": "rack"}),
    "grace period": at("spec.rollout.gracePeriodSeconds", 60),
    "other roles": at("spec.roles", {"mixed": {"pools": [CPU]}}),
}

STAYS: dict[str, Change] = {
    "routing": at("spec.routing.offload.prefillLengthThreshold", 1),
    "qos": at("spec.qos.admission.maxQueuedRequests", 1),
    "priority of clients": at("spec.qos.allowClientPriority", True),
    "tenants' limits": at("spec.qos.tenantDefaults", {"requestsPerSecond": 1}),
    "port": at("spec.service.port", 9999),
    "type of the service": both(at("spec.service.type", "LoadBalancer"), at("spec.service.annotations", {"a": "b"})),
    "strategy": at("spec.rollout.strategy", "Recreate"),
    "network policy": at("spec.networkPolicy.enabled", False),
    "etcd that is run here": at("spec.discovery.etcd", {"image": "etcd:3", "replicas": 3, "storage": {"size": "1Gi"}}),
    "replicas": both(at("spec.roles.decode.pools.0.replicas", 5), at("spec.roles.decode.pools.0.maxReplicas", 9)),
    "a pool more": at("spec.roles.decode.pools", [CPU, {"name": "b300", "gpu": "B300", "replicas": 1}]),
    "another pool instead": at("spec.roles.decode.pools", [{"name": "b300", "gpu": "B300", "replicas": 1}]),
    "a definition of an accelerator": at("spec.accelerators", {"X1": {"resource": "x.example/gpu"}}),
    "a pool more, of a type that is defined with it": both(
        at("spec.accelerators", {"X1": {"resource": "x.example/gpu"}}),
        at("spec.roles.decode.pools", [CPU, {"name": "x1", "gpu": "X1", "replicas": 1}]),
    ),
    "a default": at("spec.engine.blockSize", 16),
    "a default of a role": at("spec.roles.decode.engine.blockSize", 16),
    "a default in other words": at("spec.engine.kvCacheMemory", "1Gi"),
    "sections with nothing in them": both(at("spec.engine", {}), at("spec.image", {}), at("spec.roles.decode.resources", {})),
    "labels": at("metadata.labels", {"team": "chat"}),
}


def revision(document: dict[str, Any]) -> str:
    return revision_of(parse(document).spec)


@pytest.mark.parametrize("change", ROLLS.values(), ids=ROLLS.keys())
def test_change_of_what_a_pod_is_made_of_is_a_new_revision(change: Change, document: dict[str, Any]) -> None:
    change(document)

    assert revision(document) != revision(minimal())


def test_every_such_change_is_a_revision_of_its_own() -> None:
    found = set()
    for change in ROLLS.values():
        document = minimal()
        change(document)
        found.add(revision(document))

    assert len(found) == len(ROLLS)


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS.keys())
def test_other_changes_leave_the_revision(change: Change, document: dict[str, Any]) -> None:
    change(document)

    assert revision(document) == revision(minimal())


def test_same_engine_said_in_another_place_is_the_same_revision(document: dict[str, Any]) -> None:
    """Only the engine of each role counts."""
    for role in ("prefill", "decode"):
        at(f"spec.roles.{role}.engine.blockSize", 32)(document)
    other = minimal()
    at("spec.engine.blockSize", 32)(other)

    assert revision(document) == revision(other)


def test_removed_change_gives_the_old_revision_back(document: dict[str, Any]) -> None:
    at("spec.engine.blockSize", 32)(document)
    without("spec.engine.blockSize")(document)

    assert revision(document) == revision(minimal())


def test_operator_that_knows_one_more_field_gives_the_same_revision(document: dict[str, Any]) -> None:
    """Else an upgrade of the operator would roll every cluster."""

    class NextEngine(EngineSpec):
        lookahead: int = Field(default=0)

    spec = parse(document).spec
    later = PDClusterSpec.model_construct(**{**dict(spec), "engine": NextEngine()})

    assert "lookahead" in later.engine_of("decode").model_dump()
    assert revision_of(later) == revision_of(spec)


def test_revision_is_stable_between_versions(document: dict[str, Any]) -> None:
    """A change here means that an upgrade rolls every cluster: it must be on purpose."""
    assert revision(document) == "88e2aa26"
