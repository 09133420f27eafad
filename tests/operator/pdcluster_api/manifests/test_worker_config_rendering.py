"""The worker's two files: the engine file without what is the default anyway, the policy file in
full.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.manifests.worker_config import (
    EtcdTls,
    WorkerFileSettings,
    engine_file,
    policy_file,
)
from pdcluster_schema.load import parse
from pdcluster_schema.revision import revision_of

SITE = WorkerFileSettings(
    model_path="/abs/tiny",
    etcd_endpoints=("127.0.0.1:2379",),
    ca="/c/ca.pem",
    certificate="/c/worker.pem",
    key="/c/worker.key",
    host="127.0.0.1",
    http_port=8000,
    grpc_port=0,
    kv_port=0,
)


def test_engine_file_has_what_differs_from_the_defaults(document: dict[str, Any]) -> None:
    document["spec"]["engine"] = {"kvCacheMemory": "512Mi", "maxModelLen": 4096}
    cluster = parse(document)
    pool = cluster.spec.roles.present()["decode"].pools[0]

    assert engine_file(cluster, "decode", pool, cluster.spec.engine_of("decode"), SITE) == {
        "cluster": "chat",
        "revision": revision_of(cluster.spec),
        "role": "decode",
        "pool": "cpu",
        "gpu": "cpu",
        "model": {"name": "tiny", "path": "/abs/tiny"},
        "engine": {"maxModelLen": 4096, "kvCacheMemory": 536870912},
        "discovery": {"endpoints": ["127.0.0.1:2379"]},
        "tls": {"ca": "/c/ca.pem", "certificate": "/c/worker.pem", "key": "/c/worker.key"},
        "listen": {"host": "127.0.0.1", "grpc": 0, "kv": 0},
    }


@pytest.mark.parametrize(
    ("gpu", "given", "sizes"),
    [
        pytest.param("cpu", {}, (2048, 128), id="CPU"),
        pytest.param("cpu", {"tensorParallelSize": 2}, (4096, 256), id="of each rank"),
        pytest.param("H100", {}, (8192, 1024), id="GPU"),
        pytest.param(
            "H100", {"maxBatchedTokens": 256, "maxSequences": 64}, (256, 64), id="our own defaults"
        ),
    ],
)
def test_the_server_of_a_stock_engine_reckons_with_the_sizes_that_vllm_has(
    document: dict[str, Any], gpu: str, given: dict[str, int], sizes: tuple[int, int]
) -> None:
    document["spec"]["engine"] = {"type": "vllm", "image": "vllm/vllm-openai:v0.32.0", **given}
    document["spec"]["roles"]["decode"]["pools"] = [{"name": "a", "gpu": gpu, "replicas": 1}]
    cluster = parse(document)
    pool = cluster.spec.roles.present()["decode"].pools[0]
    engine = engine_file(cluster, "decode", pool, cluster.spec.engine_of("decode"), SITE)["engine"]

    assert (engine["maxBatchedTokens"], engine["maxSequences"]) == sizes


def test_engine_file_names_what_an_etcd_with_tls_and_api_keys_need(
    document: dict[str, Any],
) -> None:
    cluster = parse(document)
    pool = cluster.spec.roles.present()["decode"].pools[0]
    site = replace(
        SITE,
        etcd_tls=EtcdTls(ca="/e/ca.crt", certificate="/e/tls.crt", key="/e/tls.key"),
        api_keys="/keys",
    )
    made = engine_file(cluster, "decode", pool, cluster.spec.engine_of("decode"), site)

    assert made["discovery"]["tls"] == {
        "ca": "/e/ca.crt",
        "certificate": "/e/tls.crt",
        "key": "/e/tls.key",
    }
    assert made["listen"]["apiKeys"] == "/keys"


def test_policy_file_has_the_defaults_too(document: dict[str, Any]) -> None:
    document["spec"]["routing"] = {"offload": {"minOffloadLength": 1}}

    expected = {
        "offload": {
            "policy": "rule",
            "prefillLengthThreshold": 256,
            "prefillQueueMax": 10,
            "decodeLoadThreshold": 8,
            "minOffloadLength": 1,
            "maxTransferMilliseconds": 0.0,
            "decodeBusyRatio": None,
            "score": {
                "lengthWeight": 0.7,
                "queueWeight": 0.3,
                "decodeWeight": 0.0,
                "transferWeight": 0.0,
                "transferMilliseconds": 50.0,
                "minScore": 0.5,
            },
            "islBounding": {"maxTokens": 2048, "maxRatio": 0.7},
            "prefillLoad": {"busyBatches": None},
            "sloFeedback": {
                "ttftSloMilliseconds": 500.0,
                "tpotSloMilliseconds": 50.0,
                "minThreshold": 32,
                "maxThreshold": 8192,
                "margin": 0.15,
            },
            "lengthThresholds": {},
        },
        "prefillScore": {"prefixWeight": 1.0, "loadWeight": 1.0, "transferWeight": 0.0},
        "credits": {"batchesAhead": 2.0},
        "moving": {"enabled": True, "maxMoves": 2, "afterPreemptions": 0},
        "racing": {"enabled": False, "maxRequests": 2, "maxRatio": 0.1},
        "relaying": {
            "enabled": False,
            "policy": "leastRequest",
            "prefixBytes": 1024,
            "maxRetries": 2,
        },
        "decodeScore": {
            "policy": "leastRequest",
            "temperature": 0.0,
            "kvEvents": True,
            "recentSeconds": 120.0,
            "hotspotPrevention": True,
            "hotWorkersRatio": 0.75,
            "maxShareRatio": 1.5,
            "minCacheHitRatio": 0.5,
            "sessionAffinity": True,
            "failureTaint": 1.0,
            "queueThresholdTokens": None,
            "allowRequestOverrides": False,
            "kvAware": {
                "overlapCredit": 1.0,
                "prefillLoadScale": 1.0,
                "prefillDecay": 0.0,
                "activeRequestWeight": 0.0,
                "trackPrefill": True,
            },
            "capacityAware": {"occupancyWeight": 0.7, "activeWeight": 0.3},
            "latencyAware": {
                "kvOccupancyWeight": 3.0,
                "activeWeight": 1.0,
                "cacheMatchWeight": 10.0,
                "memoryBandwidthWeight": 0.5,
                "recentPrefixWeight": 1.0,
            },
        },
        "admission": {
            "maxQueuedRequests": 1024,
            "maxQueuedTokens": 0,
            "maxBodyBytes": 4194304,
            "workerWaitSeconds": 0.0,
        },
        "slo": {"ttftMilliseconds": 500.0, "tpotMilliseconds": None},
        "earlyRejection": {"enabled": False, "rejectOnSloViolation": True},
        "highPriority": {"offloadAtOnce": False},
        "lowPriority": {
            "thresholdMilliseconds": None,
            "pastThreshold": "Shed",
            "prefillWorkers": "Allowed",
        },
        "degradation": {
            "atPressure": 0.8,
            "maxTokens": None,
            "maxPromptTokens": None,
            "smallerModel": None,
        },
        "estimation": {
            "estimator": "ema",
            "allowClientDeadline": False,
            "rejectUnmeetable": False,
            "sloGranularitySeconds": 100.0,
            "presetTokenMilliseconds": None,
            "presetOutputTokens": 256,
        },
        "tenantDefaults": {
            "priority": None,
            "requestsPerSecond": None,
            "maxConcurrentRequests": None,
            "tokensPerMinute": None,
        },
        "tenants": {},
        "stallSeconds": 20,
        "allowClientPriority": False,
        "sharedPrefixCache": False,
    }
    assert {
        name: value for name, value in policy_file(parse(document)).items() if name in expected
    } == expected


@pytest.mark.parametrize(
    ("gpus", "given", "threshold", "by_type"),
    [
        pytest.param(["cpu"], None, 256, {}, id="not known: 256"),
        pytest.param(["H100"], None, 295, {}, id="break-even of the accelerator"),
        pytest.param(["H100", "H200"], None, 206, {"H100": 295, "H200": 206}, id="of each type"),
        pytest.param(["H100", "H200"], 100, 100, {}, id="as given"),
        pytest.param(["H100"], 0, 0, {}, id="as given, if 0"),
    ],
)
def test_length_threshold_is_the_break_even_of_the_decode_pools(
    document: dict[str, Any],
    gpus: list[str],
    given: int | None,
    threshold: int,
    by_type: dict[str, int],
) -> None:
    document["spec"]["roles"]["decode"]["pools"] = [
        {"name": gpu.lower(), "gpu": gpu, "replicas": 1} for gpu in gpus
    ]
    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": given}}
    offload = policy_file(parse(document))["offload"]

    assert (offload["prefillLengthThreshold"], offload["lengthThresholds"]) == (threshold, by_type)


def test_length_threshold_of_an_accelerator_that_the_object_defines_is_256(
    document: dict[str, Any],
) -> None:
    document["spec"]["accelerators"] = {"H100": {"resource": "my/gpu"}}
    document["spec"]["roles"]["decode"]["pools"] = [{"name": "a", "gpu": "H100", "replicas": 1}]

    assert policy_file(parse(document))["offload"]["prefillLengthThreshold"] == 256
