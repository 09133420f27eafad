"""Changes of an object that replace its workers, and changes that do not."""

from typing import Any

from pdcluster_schema.load import parse
from pdcluster_schema.revision import revision_of
from tests.schema.object_cases import CPU, HUB, Change, at, both, vllm

ENDPOINTS = at("spec.discovery.etcd.endpoints", ["etcd:2379"])


ROLLS: dict[str, Change] = {
    "model": at("spec.model.dtype", "float32"),
    "template of the model": at("spec.model.chatTemplate", "chatml-tools"),
    "parser of calls": at("spec.model.toolParser", "hermes"),
    "parser of reasoning": at("spec.model.reasoningParser", "none"),
    "front end of the engine": both(vllm(), at("spec.model.frontend", "engine")),
    "source of the model": at("spec.model", HUB),
    "revision of the repository": at(
        "spec.model", {"name": "tiny", "huggingFace": {"repo": "a/b", "revision": "v2"}}
    ),
    "volume": at("spec.model.pvc", {"claimName": "models"}),
    "image": at("spec.image.name", "worker:2"),
    "pull policy": at("spec.image.pullPolicy", "Always"),
    "engine": at("spec.engine.blockSize", 32),
    "size that a CPU has anyway, and no accelerator": at("spec.engine.kvCacheMemory", "1Gi"),
    "engine of a role": at("spec.roles.decode.engine.maxSequences", 32),
    "resources": at("spec.roles.decode.resources.limits", {"memory": "1Gi"}),
    "claims": at(
        "spec.roles.decode.resourceClaims", [{"name": "nic", "resourceClaimTemplateName": "nic"}]
    ),
    "shared memory": at("spec.roles.decode.sharedMemory", "2Gi"),
    "time to start": at("spec.roles.prefill.startupTimeoutSeconds", 60),
    "pod template": at("spec.podTemplate", {"spec": {"hostNetwork": True}}),
    "pod template of a role": at(
        "spec.roles.prefill.podTemplate", {"metadata": {"labels": {"a": "b"}}}
    ),
    "etcd of one's own": ENDPOINTS,
    "TLS of that etcd": both(ENDPOINTS, at("spec.discovery.etcd.tlsSecret", "tls")),
    "API keys": at("spec.service.apiKeySecret", "keys"),
    "placement": at("spec.placement", {"domainLabel": "rack"}),
    "grace period": at("spec.rollout.gracePeriodSeconds", 60),
    "other roles": at("spec.roles", {"mixed": {"pools": [CPU]}}),
}


OF_ONE_ROLE = {
    "engine of a role": "decode",
    "resources": "decode",
    "claims": "decode",
    "shared memory": "decode",
    "time to start": "prefill",
    "pod template of a role": "prefill",
}
"""Those of them that concern the workers of one role, which pair with those of the other as before.
"""

STAYS: dict[str, Change] = {
    "routing": at("spec.routing.offload.prefillLengthThreshold", 1),
    "qos": at("spec.qos.admission.maxQueuedRequests", 1),
    "priority of clients": at("spec.qos.allowClientPriority", True),
    "tenants' limits": at("spec.qos.tenantDefaults", {"requestsPerSecond": 1}),
    "port": at("spec.service.port", 9999),
    "type of the service": both(
        at("spec.service.type", "LoadBalancer"), at("spec.service.annotations", {"a": "b"})
    ),
    "endpoint picker": at("spec.service.endpointPicker", {"name": "picker"}),
    "strategy": at("spec.rollout.strategy", "Recreate"),
    "steps": at("spec.rollout", {"strategy": "Rolling", "maxSurge": 2}),
    "gates": both(
        at("spec.rollout", {"strategy": "Rolling", "onFailure": "Rollback", "minRequests": 9}),
        at("spec.autoscale", {"mode": "Advise", "objective": {"ttft": {"seconds": 1.0}}}),
    ),
    "network policy": at("spec.networkPolicy.enabled", False),
    "etcd that is run here": at(
        "spec.discovery.etcd", {"image": "etcd:3", "replicas": 3, "storage": {"size": "1Gi"}}
    ),
    "replicas": both(
        at("spec.roles.decode.pools.0.replicas", 5), at("spec.roles.decode.pools.0.maxReplicas", 9)
    ),
    "a pool more": at(
        "spec.roles.decode.pools", [CPU, {"name": "b300", "gpu": "B300", "replicas": 1}]
    ),
    "another pool instead": at(
        "spec.roles.decode.pools", [{"name": "b300", "gpu": "B300", "replicas": 1}]
    ),
    "a definition of an accelerator": at(
        "spec.accelerators", {"X1": {"resource": "x.example/gpu"}}
    ),
    "a pool more, of a type that is defined with it": both(
        at("spec.accelerators", {"X1": {"resource": "x.example/gpu"}}),
        at("spec.roles.decode.pools", [CPU, {"name": "x1", "gpu": "X1", "replicas": 1}]),
    ),
    "a default": at("spec.engine.blockSize", 16),
    "a default of a role": at("spec.roles.decode.engine.blockSize", 16),
    "sections with nothing in them": both(
        at("spec.engine", {}), at("spec.image", {}), at("spec.roles.decode.resources", {})
    ),
    "labels": at("metadata.labels", {"team": "chat"}),
}


def revision(document: dict[str, Any]) -> str:
    return revision_of(parse(document).spec)
