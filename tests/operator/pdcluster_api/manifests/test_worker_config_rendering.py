"""The worker's two files: the engine file without what is the default anyway, the policy file in
full.
"""

from typing import Any

import pytest

from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file, policy_file
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
    document["spec"]["accelerators"] = {"X1": {"resource": "my/gpu"}}
    document["spec"]["roles"]["decode"]["pools"] = [{"name": "a", "gpu": "X1", "replicas": 1}]

    assert policy_file(parse(document))["offload"]["prefillLengthThreshold"] == 256
