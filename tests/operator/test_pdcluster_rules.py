"""Each rule of the PDCluster object: a good value passes, a bad one is refused with its path, reason and fix."""

from collections.abc import Callable
from typing import Any

import pytest

from pdcluster_operator.api.errors import InvalidObjectError
from pdcluster_operator.api.load import parse

Change = Callable[[dict[str, Any]], None]


def at(path: str, value: Any) -> Change:
    """A change that sets the value at a dotted path below the object, making sections on the way."""
    *parents, last = path.split(".")

    def change(content: Any) -> None:
        for part in parents:
            content = content[int(part)] if part.isdigit() else content.setdefault(part, {})
        content[last] = value

    return change


def without(path: str) -> Change:
    *parents, last = path.split(".")

    def change(content: Any) -> None:
        for part in parents:
            content = content[int(part)] if part.isdigit() else content[part]
        del content[last]

    return change


POOL = "spec.roles.decode.pools.0"

GOOD = {
    "minimum": lambda content: None,
    "mixed": at("spec.roles", {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}}),
    "two pools": at(
        "spec.roles.prefill.pools", [{"name": "b200", "gpu": "B200", "replicas": 4}, {"name": "b300", "gpu": "B300", "replicas": 2}]
    ),
    "bounds": at("spec.roles.decode.pools", [{"name": "cpu", "replicas": 2, "minReplicas": 2, "maxReplicas": 2}]),
    "no prefill worker": at("spec.roles.prefill.pools", [{"name": "cpu", "replicas": 0}]),
    "quantity": at("spec.engine", {"kvCacheMemory": "1.5Gi"}),
    "bytes": at("spec.engine", {"kvCacheMemory": 1073741824}),
    "role engine": at("spec.roles.prefill.engine", {"maxBatchedTokens": 512}),
    "a token for each sequence": at("spec.engine", {"maxBatchedTokens": 64, "maxSequences": 64}),
    "same block size for both": at("spec.engine", {"blockSize": 32}),
    "policy": at("spec.routing", {"offload": {"prefillQueueMax": 0}, "prefillScore": {"loadWeight": 2}, "credits": {"batchesAhead": 0.5}}),
    "endpoints": at("spec.discovery", {"etcd": {"endpoints": ["etcd-0.etcd:2379", "10.0.0.1:2379"]}}),
    "longest name": at("metadata.name", "c" * 31),
    "labels": at("metadata.labels", {"team": "chat"}),
}

BAD = [
    (at("apiVersion", "pdcluster.io/v2"), "apiVersion: must be 'pdcluster.io/v1alpha1', not 'pdcluster.io/v2'; change it to that"),
    (without("metadata.name"), "metadata.name: is required; add it"),
    (at("metadata.name", "My_Chat"), "metadata.name: 'My_Chat' is not a name that Kubernetes takes; use at most 63 lower-case letters"),
    (
        at("metadata.name", "c" * 32),
        "metadata.name: " + "c" * 32 + "-prefill-cpu with a revision is 53 characters; a workload's name holds 52; shorten",
    ),
    (without("spec.model"), "spec.model: is required; add it"),
    (at("spec.model.path", ""), "spec.model.path: must not be empty text, not ''; write its name or path"),
    (at("spec.model.dtype", "float16"), "spec.model.dtype: must be 'auto', 'float32' or 'bfloat16', not 'float16'; change it to that"),
    (
        without("spec.roles.decode"),
        "spec.roles: must be exactly {prefill, decode} or {mixed}, not {prefill}; add the missing role or remove the others",
    ),
    (
        at("spec.roles.mixed", {"pools": [{"name": "cpu", "replicas": 1}]}),
        "spec.roles: must be exactly {prefill, decode} or {mixed}, not {decode, ",
    ),
    (at("spec.roles.decode.pools", []), "spec.roles.decode.pools: must hold 1 to 16 pools, not 0; add or remove pools"),
    (at("spec.roles.decode.pools", {}), "spec.roles.decode.pools: must be a list, not {}; write its entries as `- ...` lines"),
    (
        at("spec.roles.decode.pools", [{"name": "cpu", "replicas": 1}, {"name": "cpu", "replicas": 1}]),
        "spec.roles.decode.pools[1].name: 'cpu' names two pools of this role; give each pool its own name",
    ),
    (at(f"{POOL}.name", "Cpu"), "spec.roles.decode.pools[0].name: 'Cpu' is not a name that Kubernetes takes"),
    (
        at(f"{POOL}.gpu", "A100"),
        "spec.roles.decode.pools[0].gpu: 'A100' is not a known accelerator; use one of B200, B300, GB200, GB300, H100, H200, cpu",
    ),
    (
        at(f"{POOL}.gpusPerReplica", 2),
        "spec.roles.decode.pools[0].gpusPerReplica: must be 1, not 2; workers run without tensor parallelism",
    ),
    (without(f"{POOL}.replicas"), "spec.roles.decode.pools[0].replicas: is required; add it"),
    (at(f"{POOL}.replicas", -1), "spec.roles.decode.pools[0].replicas: must be at least 0, not -1; raise it"),
    (
        at(f"{POOL}.replicas", "1"),
        "spec.roles.decode.pools[0].replicas: must be a whole number, not '1'; write it without quotes or a fraction",
    ),
    (at(f"{POOL}.replicas", True), "spec.roles.decode.pools[0].replicas: must be a whole number, not True"),
    (
        at(f"{POOL}.minReplicas", 2),
        "spec.roles.decode.pools[0].replicas: must be at least minReplicas (2), not 1; raise replicas or lower minReplicas",
    ),
    (
        at(f"{POOL}.maxReplicas", 0),
        "spec.roles.decode.pools[0].replicas: must be at most maxReplicas (0), not 1; lower replicas or raise maxReplicas",
    ),
    (
        at("spec.roles.decode.pools", [{"name": "cpu", "replicas": 2, "minReplicas": 3, "maxReplicas": 2}]),
        "spec.roles.decode.pools[0].minReplicas: must be at most maxReplicas (2), not 3; lower minReplicas or raise maxReplicas",
    ),
    (at(f"{POOL}.replica", 1), "spec.roles.decode.pools[0].replica: unknown field; did you mean replicas?"),
    (at("spec.autoscale", {}), "spec.autoscale: unknown field; known here: model, roles, engine, routing, qos, discovery, service"),
    (
        at("spec.roles.decode.engine", {"blockSize": 32}),
        "spec.roles.decode.engine.blockSize: KV blocks move between roles, but blockSize is 16 for prefill and 32 for decode; give both",
    ),
    (
        at("spec.roles.decode.engine", {"maxSequences": 512}),
        "spec.roles.decode.engine.maxBatchedTokens: must be at least maxSequences (512), for a step computes",
    ),
    (at("spec.engine", None), "spec.engine: is empty; give it a value or remove the key"),
    (at("spec.engine", "big"), "spec.engine: must be a section of fields, not 'big'; write `field: value` lines below it"),
    (at("spec.engine.maxSequences", 1.5), "spec.engine.maxSequences: must be a whole number, not 1.5"),
    (
        at("spec.engine.prefixCaching", "yes"),
        "spec.engine.prefixCaching: must be true or false, not 'yes'; write true or false without quotes",
    ),
    (
        at("spec.engine.kvCacheMemory", "512MB"),
        "spec.engine.kvCacheMemory: '512MB' is not an amount of memory; write bytes, or a number with Ki, Mi, Gi",
    ),
    (at("spec.engine.kvCacheMemory", 0), "spec.engine.kvCacheMemory: must be at least 1, not 0; raise it"),
    (at("spec.engine.scheduler", "static"), "spec.engine.scheduler: must be 'continuous', not 'static'; change it to that"),
    (at("spec.engine.fenceTimeoutSeconds", 0), "spec.engine.fenceTimeoutSeconds: must be more than 0, not 0; raise it"),
    (at("spec.routing.offlod", {}), "spec.routing.offlod: unknown field; did you mean offload?"),
    (
        at("spec.routing.prefillScore.loadWeight", "1"),
        "spec.routing.prefillScore.loadWeight: must be a number, not '1'; write it without quotes",
    ),
    (
        at("spec.routing.prefillScore.loadWeight", float("inf")),
        "spec.routing.prefillScore.loadWeight: must be a finite number, not inf; write one",
    ),
    (at("spec.qos.admission.maxQueuedRequests", 0), "spec.qos.admission.maxQueuedRequests: must be at least 1, not 0; raise it"),
    (
        at("spec.discovery.etcd.endpoints", ["http://etcd:2379"]),
        "spec.discovery.etcd.endpoints[0]: must be host:port, not 'http://etcd:2379'; write it like 127.0.0.1:2379",
    ),
    (at("spec.service.port", 70000), "spec.service.port: must be at most 65535, not 70000; lower it"),
    (at("spec.model.name", 7), "spec.model.name: must be text, not 7; put it in quotes"),
]


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD.keys())
def test_rules_accept(change: Change, document: dict[str, Any]) -> None:
    change(document)

    assert parse(document).metadata.namespace == "default"


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_rules_refuse(change: Change, message: str, document: dict[str, Any]) -> None:
    change(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)

    assert [str(fault)[: len(message)] for fault in refused.value.faults] == [message]


def test_rules_name_every_fault_at_once(document: dict[str, Any]) -> None:
    at("spec.service.port", 0)(document)
    at("spec.engine.threads", -1)(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)

    assert [fault.path for fault in refused.value.faults] == ["spec.engine.threads", "spec.service.port"]


def test_engine_of_a_role_goes_over_the_cluster_engine(document: dict[str, Any]) -> None:
    at("spec.engine", {"maxBatchedTokens": 128, "maxSequences": 8})(document)
    at("spec.roles.prefill.engine", {"maxBatchedTokens": 256})(document)  # 256 is also the default: given counts, not different
    spec = parse(document).spec

    assert (spec.engine_of("prefill").max_batched_tokens, spec.engine_of("prefill").max_sequences) == (256, 8)
    assert spec.engine_of("decode").max_batched_tokens == 128
