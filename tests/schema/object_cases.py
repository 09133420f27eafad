"""PDCluster objects that are right, and how to change them: for the model (tests/operator) and for
the API server (tests/apiserver).
"""

import copy
from collections.abc import Callable
from typing import Any

from tests.schema.greatest_values import GREATEST

Document = dict[str, Any]
Change = Callable[[Any], None]


def no_change(content: Any) -> None:
    """A change like the others, of nothing."""


POOL = "spec.roles.decode.pools.0"
CPU = {"name": "cpu", "replicas": 1}


def minimal() -> Document:
    """A valid 1P1D object, free to be changed."""
    return copy.deepcopy(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"name": "tiny", "path": "/models/tiny"},
                "roles": {"prefill": {"pools": [{**CPU}]}, "decode": {"pools": [{**CPU}]}},
            },
        }
    )


def at(path: str, value: Any) -> Change:
    """A change that sets the value at a dotted path below the object, making sections
    on the way.
    """
    *parents, last = path.split(".")

    def change(content: Any) -> None:
        for part in parents:
            content = content[int(part)] if part.isdigit() else content.setdefault(part, {})
        content[last] = copy.deepcopy(value)

    return change


def without(path: str) -> Change:
    """A change that removes what is at a dotted path."""
    *parents, last = path.split(".")

    def change(content: Any) -> None:
        for part in parents:
            content = content[int(part)] if part.isdigit() else content[part]
        del content[last]

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(content: Any) -> None:
        for each in changes:
            each(content)

    return change


HUB = {"name": "tiny", "huggingFace": {"repo": "HuggingFaceTB/SmolLM2-135M-Instruct"}}
VOLUME = {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models.of.all"}}
CEILINGS = both(at("spec.roles.prefill.pools.0.maxReplicas", 4), at(f"{POOL}.maxReplicas", 4))
"""Without a budget, the autoscaler wants a maxReplicas of each pool."""

SLEEPS = both(
    *(
        at(f"spec.roles.{role}.pools.0.{field}", number)
        for role in ("prefill", "decode")
        for field, number in (("minReplicas", 0), ("maxReplicas", 4))
    ),
    at("spec.autoscale", {"mode": "On"}),
    at("spec.qos", {"admission": {"workerWaitSeconds": 300}}),
)
"""All pools may go to zero; routers, which that needs, are not there."""

NIGHT = {
    "name": "night",
    "role": "decode",
    "pool": "cpu",
    "start": "22:00",
    "end": "06:00",
    "maxReplicas": 4,
}
AUTOSCALE = {
    "mode": "On",
    "intervalSeconds": 7,
    "staleAfter": 5,
    "prefill": {
        "queueUp": 4,
        "queueDown": 0,
        "backlogUpSeconds": 2,
        "utilizationUp": 1,
        "ttftSeconds": 0.5,
        "headroom": 0.25,
    },
    "decode": {"queueUp": 9, "kvUsageUp": 0.9, "kvUsageDown": 0, "tpotSeconds": 0.05},
    "objective": {"queue": {"percentile": 50, "seconds": 0.1}},
    "scaleUp": {"windowSeconds": 10, "maxStep": 4},
    "scaleDown": {"windowSeconds": 0, "maxStep": 0},
    "tolerance": 0,
    "ratio": {"min": 0.25, "max": 2},
    "budget": {"total": 16, "perGpu": {"H100": 8, "cpu": 8}},
    "schedules": [
        {
            **NIGHT,
            "days": ["Mon", "Sun"],
            "timeZone": "Europe/Berlin",
            "minReplicas": 0,
            "maxReplicas": 2,
        }
    ],
    "cost": {"H100": 2.5, "MI355X": 1},
    "capacitySeconds": 30,
    "backoffSeconds": 60,
}
FULL: Change = both(
    at("spec.model", {**HUB, "nodeCache": "/var/cache/models"}),
    at(
        "spec.image",
        {
            "name": "registry.example/pdcluster-worker:1",
            "pullPolicy": "Never",
            "pullSecrets": ["regcred", "a.b"],
        },
    ),
    at(
        "spec.accelerators",
        {
            "MI355X": {
                "resource": "amd.com/gpu",
                "nodeLabels": {"amd.com/gpu.product-name": "MI355X"},
            },
            "H100": {},
        },
    ),
    at("spec.roles.prefill.pools.0.gpu", "MI355X"),
    at(
        "spec.roles.prefill.resources",
        {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"cpu": "2500m", "memory": "2Gi"}},
    ),
    at(
        "spec.podTemplate",
        {
            "metadata": {"labels": {"team": "chat"}},
            "spec": {"tolerations": [{"operator": "Exists"}]},
        },
    ),
    at(
        "spec.roles.decode.podTemplate",
        {"spec": {"containers": [{"name": "worker", "securityContext": {"privileged": True}}]}},
    ),
    at(
        "spec.discovery",
        {
            "etcd": {
                "replicas": 3,
                "image": "etcd:3",
                "storage": {"size": "2Gi", "className": "fast", "retain": True},
            }
        },
    ),
    at(
        "spec.service",
        {
            "port": 80,
            "type": "LoadBalancer",
            "annotations": {"example.com/internal": "true"},
            "apiKeySecret": "keys",
        },
    ),
    at("spec.placement", {"domainLabel": "topology.kubernetes.io/rack", "mode": "Required"}),
    at("spec.autoscale", AUTOSCALE),
    at(
        "spec.rollout",
        {
            "strategy": "Recreate",
            "gracePeriodSeconds": 10,
            "drainTimeoutSeconds": 60,
            "progressDeadlineSeconds": 30,
        },
    ),
    at("spec.networkPolicy", {"enabled": False}),
)

VLLM: dict[str, Any] = {"type": "vllm", "image": "vllm/vllm-openai:v0.32.0"}


def vllm(**more: Any) -> Change:
    """A change to the engine of all roles, with more of its fields."""
    return at("spec.engine", {**VLLM, **more})


def sglang(**more: Any) -> Change:
    return vllm(type="sglang", image="lmsysorg/sglang:v0.5.23", **more)


RIGHT_STOCK_ENGINES: dict[str, Change] = {
    "stock engine": vllm(),
    "stock engine with its own front end": both(
        vllm(
            args=[
                *("--tool-call-parser", "openai", "--reasoning-parser=openai_gptoss"),
                *("--tokenizer-mode", "auto", "--chat-template", "/models/template.jinja"),
            ]
        ),
        at("spec.model.frontend", "engine"),
    ),
    "stock engine with flags": vllm(
        command=["/opt/vllm/bin/vllm", "serve"],
        args=["--enforce-eager", "--max-lora-rank=8", "--model-impl", "auto", "-q", "fp8"],
        env=[{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}, {"name": "UCX_TLS", "value": ""}],
    ),
    "stock engine of sizes": vllm(
        maxSequences=512,
        maxModelLen=4096,
        blockSize=64,
        prefixCaching=False,
        kvCacheMemory="2Gi",
        tensorParallelSize=2,
    ),
    "stock engine of another image for a role": both(
        at("spec.engine", {"type": "vllm"}),
        at("spec.roles.prefill.engine", {"image": "vllm:a", "args": ["--async-scheduling"]}),
        at("spec.roles.decode.engine", {"image": "vllm:b"}),
    ),
    "sglang": both(
        sglang(maxModelLen=4096, numBlocks=64, args=["--attention-backend", "torch_native"]),
        at("spec.roles", {"mixed": {"pools": [CPU]}}),
    ),
    "sglang over pods": both(
        sglang(tensorParallelSize=2, pipelineParallelSize=2),
        at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H100", "podsPerReplica": 2}]}}),
    ),
    "sglang of sizes": both(
        sglang(blockSize=24, maxBatchedTokens=240),
        at("spec.roles", {"mixed": {"pools": [CPU]}}),
    ),
    **{
        f"image of a registry's own tags, {image}": at("spec.engine", {**VLLM, "image": image})
        for image in (
            "reg/acme/vllm-openai:1.4.2",
            "vllm-openai:2026.10.1",
            "reg/vllm-openai-internal:0.10.1",
            "vllm/acme:v0.5.20",
            "lmsysorg/sglang/acme-vllm:v0.32.0",
            "vllm/vllm-openai-xpu:v0.33.0",
        )
    },
    "overrides of a pair in two spellings": both(
        vllm(args=["--hf-overrides.rope_scaling.factor", "2", "--hf-overrides.a", "x"]),
        at(
            "spec.roles.decode.engine.args",
            ['--hf-overrides={"a": "x", "rope_scaling": {"factor": 2}}'],
        ),
    ),
    "weights of a pair that are read in two ways": both(
        vllm(args=["--load-format", "safetensors"]),
        at("spec.roles.decode.engine.args", ["--load-format=runai_streamer"]),
    ),
    "offloaded KV of which each pod has a part": both(
        vllm(dataParallelSize=16, kvTransfer={"offload": {"memory": "200Gi"}}),
        at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H200", "podsPerReplica": 2}]}}),
        at("spec.roles.mixed.resources", {"limits": {"memory": "101Gi"}}),
        at("spec.roles.mixed.sharedMemory", "101Gi"),
    ),
    "eight ranks over two nodes of four": both(
        vllm(dataParallelSize=8),
        at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "GB200", "podsPerReplica": 2}]}}),
    ),
    "nodes of GB200 with more": both(
        vllm(tensorParallelSize=8),
        at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "GB200", "gpusPerPod": 8}]}}),
    ),
    "mixed stock engines": both(vllm(), at("spec.roles", {"mixed": {"pools": [CPU]}})),
    "mixed stock engines of several stages, which offload": both(
        vllm(pipelineParallelSize=2, kvTransfer={"offload": {"memory": "2Gi"}}),
        at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H100"}]}}),
    ),
    "stock engine with a connector": both(
        vllm(
            kvTransfer={
                "connector": "NixlConnector",
                "backends": ["LIBFABRIC", "UCX"],
                "extraConfig": {"engine_ttl": 600, "kv_lease_duration": 60},
            }
        ),
        at("spec.roles.prefill.pools.0.gpu", "B200"),
        at(
            "spec.roles.prefill.engine.kvTransfer.offload",
            {"memory": "200Gi", "blocksPerChunk": 8, "evictionPolicy": "arc"},
        ),
        at("spec.roles.prefill.resources", {"limits": {"memory": "201Gi"}}),
    ),
}

CLAIMS = [
    {"name": "nic", "resourceClaimTemplateName": "nic"},
    {"name": "domain", "resourceClaimName": "domain.channel"},
]
GOOD: dict[str, Change] = {
    **RIGHT_STOCK_ENGINES,
    "minimum": lambda content: None,
    "everything": FULL,
    "mixed": at("spec.roles", {"mixed": {"pools": [CPU]}}),
    "mixed, and a floor of null": both(
        at("spec.roles", {"mixed": {"pools": [CPU]}}),
        at("spec.placement", {"domainLabel": "rack", "minTransferGBps": None}),
    ),
    "two pools": at(
        "spec.roles.prefill.pools",
        [
            {"name": "b200", "gpu": "B200", "replicas": 4},
            {"name": "b300", "gpu": "B300", "replicas": 2},
        ],
    ),
    "bounds": at(
        "spec.roles.decode.pools",
        [{"name": "cpu", "replicas": 2, "minReplicas": 2, "maxReplicas": 2}],
    ),
    "greatest numbers": both(
        at("spec.rollout", {"strategy": "Rolling", "onFailure": "Pause"}),
        at("spec.autoscale.mode", "Advise"),
        *(at(path, most) for path, most in GREATEST.items()),
    ),
    "most replicas": at(f"{POOL}.replicas", 1024),
    "most workers": at(
        "spec.roles.decode.pools", [{"name": f"p{number}", "replicas": 273} for number in range(15)]
    ),
    "no ceiling but the budget": at("spec.autoscale", {"mode": "On", "budget": {"total": 8}}),
    "no ceiling but each pool's own": both(
        CEILINGS, at("spec.autoscale", {"mode": "On", "intervalSeconds": 5})
    ),
    "pools that sleep": both(SLEEPS, at("spec.roles.router", {"pools": [CPU]})),
    "one pool that never sleeps": both(SLEEPS, at(f"{POOL}.minReplicas", 1)),
    "no prefill worker": at("spec.roles.prefill.pools", [{"name": "cpu", "replicas": 0}]),
    "most pools": at(
        "spec.roles.prefill.pools", [{"name": f"p{number}", "replicas": 0} for number in range(15)]
    ),
    "largest pod template": at("spec.podTemplate", {"spec": {"hostname": "a" * (32 * 1024 - 24)}}),
    "quantity": at("spec.engine", {"kvCacheMemory": "1.5Gi"}),
    "bytes": at("spec.engine", {"kvCacheMemory": 1073741824}),
    "less than a byte is one": at("spec.engine", {"kvCacheMemory": "0.50"}),
    "share of a device": at("spec.engine", {"deviceMemoryShare": 0.9}),
    "all of a device": at("spec.engine", {"deviceMemoryShare": 1}),
    "role engine": at("spec.roles.prefill.engine", {"maxBatchedTokens": 512}),
    "a token for each sequence": at("spec.engine", {"maxBatchedTokens": 64, "maxSequences": 64}),
    "scheduler of a role": at(
        "spec.roles.prefill.engine", {"scheduler": "prefill-first", "maxBatchedTokens": 8192}
    ),
    "whole prompts": at(
        "spec.engine", {"chunkedPrefill": False, "maxModelLen": 256, "schedulingPolicy": "fcfs"}
    ),
    "sarathi": at(
        "spec.engine",
        {
            "scheduler": "sarathi",
            "tbtSloMilliseconds": 50.5,
            "chunkSchedule": {"low": 32, "high": 256, "stages": 4, "maxTokens": 4096},
        },
    ),
    "long prompts": at("spec.engine", {"longPrefillTokenThreshold": 64, "maxModelLen": 64}),
    "same block size for both": at("spec.engine", {"blockSize": 32}),
    "policy": at(
        "spec.routing",
        {
            "offload": {"prefillQueueMax": 0},
            "prefillScore": {"loadWeight": 2},
            "credits": {"batchesAhead": 0.5},
        },
    ),
    "endpoints": at(
        "spec.discovery",
        {
            "etcd": {
                "endpoints": ["etcd-0.etcd:2379", "10.0.0.1:2379"],
                "tlsSecret": "etcd.client-tls",
            }
        },
    ),
    "volume": at("spec.model", VOLUME),
    "hub": at("spec.model", HUB),
    "no limit of a step": at("spec.autoscale", {"scaleDown": {"maxStep": 0}}),
    "nothing said, in other words": both(
        at(
            "spec.model",
            {
                "name": "tiny",
                "path": "/models/tiny",
                "huggingFace": None,
                "nodeCache": None,
                "pvc": None,
            },
        ),
        at("spec.engine.maxModelLen", None),
        at(f"{POOL}.minReplicas", None),
    ),
    "empty sections": lambda content: content["spec"].update(
        {
            name: {}
            for name in (
                "image",
                "engine",
                "accelerators",
                "routing",
                "qos",
                "discovery",
                "service",
                "autoscale",
                "rollout",
            )
        }
    ),
    "endpoint picker": at(
        "spec.service.endpointPicker", {"name": "picker", "port": 9003, "failureMode": "FailOpen"}
    ),
    "claims": at("spec.roles.decode.resourceClaims", CLAIMS),
    "claims of stock engines": both(
        vllm(),
        at("spec.roles.prefill.resourceClaims", CLAIMS),
        at(
            "spec.roles.router",
            {"pools": [CPU], "sharedMemory": "2Gi", "startupTimeoutSeconds": 60},
        ),
    ),
    "start within the deadline": both(
        at("spec.roles.prefill.startupTimeoutSeconds", 5400),
        at("spec.rollout.progressDeadlineSeconds", 5400),
    ),
    "a roll out by steps": at(
        "spec.rollout", {"strategy": "Rolling", "maxSurge": "100%", "maxUnavailable": 1}
    ),
    "a roll out by steps behind routers": both(
        at("spec.roles.router", {"pools": [CPU]}), at("spec.rollout.strategy", "Rolling")
    ),
    "a roll out with gates": at(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Pause", "bakeSeconds": 0, "whenUnknown": "Continue"},
    ),
    "a roll out by latencies": both(
        at("spec.autoscale", {"mode": "Advise", "prefill": {"ttftSeconds": 1.0}}),
        at("spec.rollout", {"strategy": "Rolling", "onFailure": "Pause", "minRequests": 1}),
    ),
    "shared memory": at("spec.roles.decode.sharedMemory", "64Gi"),
    "longest name": at("metadata.name", "c" * 31),
    "labels": at("metadata.labels", {"team": "chat"}),
}
