"""vLLM's connectors of KV, and the memory that they need."""

import json
from typing import Any

import pytest

from pdcluster_api.manifests.vllm import IN_CONTAINER, vllm_command
from tests.operator.pdcluster_api.manifests.rendering import cluster_of, pod_of
from tests.schema.object_cases import CPU, Change, at, both, vllm

ON_GPU = both(*(at(f"spec.roles.{role}.pools.0.gpu", "B200") for role in ("prefill", "decode")))
MIXED = at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "B200"}]}})
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 200 << 30},
}


def config_of(*changes: Change, role: str = "decode") -> dict[str, Any]:
    cluster = cluster_of(*changes)
    pool = cluster.spec.roles.present()[role].pools[0]
    line = vllm_command(cluster, pool, cluster.spec.engine_of(role), "/m", IN_CONTAINER)
    content: dict[str, Any] = json.loads(line[line.index("--kv-transfer-config") + 1])
    return content


def test_a_section_without_fields_changes_nothing() -> None:
    given = vllm(kvTransfer={"connector": "NixlConnector"})

    assert list(config_of(given).items()) == list(config_of(vllm()).items())


def test_backends_and_numbers_are_nixl_s() -> None:
    transfer = {"backends": ["LIBFABRIC"], "extraConfig": {"engine_ttl": 4}}

    assert config_of(ON_GPU, vllm(kvTransfer=transfer)) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"engine_ttl": 4, "backends": ["LIBFABRIC"]},
    }


def test_host_memory_is_behind_nixl() -> None:
    transfer = {"backends": ["UCX"], "offload": {"memory": "200Gi"}}

    assert config_of(ON_GPU, vllm(kvTransfer=transfer)) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"backends": ["UCX"]},
                },
                OFFLOADING,
            ]
        },
    }


def test_mixed_workers_have_host_memory_alone() -> None:
    transfer = {"offload": {"memory": "200Gi"}}

    found = config_of(MIXED, vllm(kvTransfer=transfer), role="mixed")
    assert found == {**OFFLOADING, "kv_load_failure_policy": "recompute"}


def test_ranks_share_a_worker_s_host_memory() -> None:
    fields: dict[str, Any] = {"kvTransfer": {"offload": {"memory": "200Gi"}}, "dataParallelSize": 4}

    found = config_of(MIXED, vllm(**fields), role="mixed")["kv_connector_extra_config"]
    assert found == {"cpu_bytes_to_use": 50 << 30}


def test_fields_of_a_role_go_over_those_of_the_spec() -> None:
    own = {"offload": {"memory": "1Gi", "blocksPerChunk": 8, "evictionPolicy": "arc"}}
    changes = (
        ON_GPU,
        vllm(kvTransfer={"backends": ["LIBFABRIC"]}),
        at("spec.roles.prefill.engine", {"kvTransfer": own}),
    )

    nixl, offloading = config_of(*changes, role="prefill")["kv_connector_extra_config"][
        "connectors"
    ]
    assert nixl["kv_connector_extra_config"] == {"backends": ["LIBFABRIC"]}
    assert offloading["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 1 << 30,
        "blocks_per_chunk": 8,
        "eviction_policy": "arc",
    }
    assert config_of(*changes)["kv_connector"] == "NixlConnector"


@pytest.mark.parametrize(
    ("offload", "size"), [({}, "8Gi"), ({"offload": {"memory": "1.5Gi"}}, "10Gi")]
)
def test_shared_memory_holds_what_is_offloaded(offload: dict[str, Any], size: str) -> None:
    volumes = pod_of(ON_GPU, vllm(kvTransfer=offload))["spec"]["volumes"]

    (memory,) = (each["emptyDir"] for each in volumes if each["name"] == "shared-memory")
    assert memory == {"medium": "Memory", "sizeLimit": size}


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        ({"dataParallelSize": 8}, "58Gi"),
        ({"dataParallelSize": 4}, "58Gi"),
        ({"dataParallelSize": 2, "tensorParallelSize": 4}, "108Gi"),  # each over two pods
        ({"tensorParallelSize": 8}, "208Gi"),
    ],
)
def test_each_pod_holds_what_its_data_parallel_ranks_offload(
    ranks: dict[str, int], size: str
) -> None:
    given = vllm(kvTransfer={"offload": {"memory": "200Gi"}}, **ranks)
    volumes = pod_of(ON_GPU, given, at("spec.roles.decode.pools.0.podsPerReplica", 4))["spec"][
        "volumes"
    ]

    (memory,) = (each["emptyDir"] for each in volumes if each["name"] == "shared-memory")
    assert memory["sizeLimit"] == size
