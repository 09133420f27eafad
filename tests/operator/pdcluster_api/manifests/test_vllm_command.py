"""vLLM's command line and environment."""

import json
from typing import Any

import pytest

from pdcluster_api.manifests.vllm import (
    IN_CONTAINER,
    VllmSettings,
    max_lora_rank,
    vllm_command,
    vllm_environment,
)
from tests.operator.pdcluster_api.manifests.rendering import cluster_of
from tests.schema.object_cases import CPU, Change, at, both, vllm

ON_A_LAPTOP = VllmSettings(http=1, kv_events=2, side_channel=3, is_process=True)
MIXED = at("spec.roles", {"mixed": {"pools": [CPU]}})
ON_GPU = at("spec.roles.decode.pools.0.gpu", "H100")


def line_of(*changes: Change, site: VllmSettings = IN_CONTAINER) -> list[str]:
    cluster = cluster_of(vllm(), *changes)
    role = cluster.spec.decode_role
    pool = cluster.spec.roles.present()[role].pools[0]
    return vllm_command(cluster, pool, cluster.spec.engine_of(role), "/models/tiny", site)


def environment_of(*changes: Change, site: VllmSettings = IN_CONTAINER) -> dict[str, str]:
    cluster = cluster_of(vllm(), *changes)
    role = cluster.spec.roles.present()["decode"]
    engine = cluster.spec.engine_of("decode")
    return vllm_environment(role.pools[0], engine, site, role.startup_seconds)


def value(line: list[str], flag: str) -> str:
    assert line.count(flag) == 1
    return line[line.index(flag) + 1]


def loaded(line: list[str], flag: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(value(line, flag))
    return content


def test_program_model_and_the_flags_of_the_user_come_first() -> None:
    line = line_of(at("spec.engine.args", ["--enforce-eager", "--seed", "7"]))

    assert line[:6] == ["vllm", "serve", "/models/tiny", "--enforce-eager", "--seed", "7"]
    assert line_of(at("spec.engine.command", ["/env/bin/vllm", "serve"]))[:3] == [
        "/env/bin/vllm",
        "serve",
        "/models/tiny",
    ]


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [
        (["--max-lora-r", "64"], 64),
        (["--max_lora_ran=64", "-v"], 64),
        (["--max-lora-rank", "8", "--max-lora-ra", "64"], 64),
        (["--max-loras", "64", "--max-lora-cls-labels", "3"], None),
        (["--max-lora-rank", "x"], None),
        ([], None),
    ],
)
def test_rank_of_adapters_is_what_vllm_takes(arguments: list[str], rank: int | None) -> None:
    assert max_lora_rank(arguments) == rank


def test_engine_answers_its_server_process_alone() -> None:
    line = line_of(site=ON_A_LAPTOP)

    assert (value(line, "--host"), value(line, "--port")) == ("127.0.0.1", "1")
    assert value(line, "--served-model-name") == "tiny"
    assert loaded(line, "--kv-events-config") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:2",
        "topic": "",
    }


def test_kv_moves_between_prefill_and_decode_alone() -> None:
    transfer = loaded(line_of(), "--kv-transfer-config")

    assert transfer == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
    }
    assert "engine_id" not in transfer  # another one at each start
    assert "kv_buffer_device" not in loaded(line_of(ON_GPU), "--kv-transfer-config")
    assert "--kv-transfer-config" not in line_of(MIXED)


def test_fields_are_passed_on_where_they_are_given() -> None:
    given = {
        "maxModelLen": 4096,
        "maxSequences": 7,
        "maxBatchedTokens": 99,
        "blockSize": 16,
        "numBlocks": 5,
        "deviceMemoryShare": 0.5,
        "tensorParallelSize": 2,
        "pipelineParallelSize": 1,
    }
    line = line_of(vllm(**given))

    assert [
        value(line, flag)
        for flag in (
            "--max-model-len",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--block-size",
            "--num-gpu-blocks-override",
            "--gpu-memory-utilization",
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
        )
    ] == ["4096", "7", "99", "16", "5", "0.5", "2", "1"]
    assert not {"--max-model-len", "--block-size", "--tensor-parallel-size"} & set(line_of())


def test_ranks_share_what_a_worker_has_behind_one_server() -> None:
    given = {"dataParallelSize": 2, "numBlocks": 9, "kvCacheMemory": "1Gi", "threads": 5}
    line = line_of(vllm(**given))

    assert value(line, "--data-parallel-size") == "2"
    assert value(line, "--api-server-count") == "1"
    assert value(line, "--num-gpu-blocks-override") == "4"
    assert value(line, "--kv-cache-memory-bytes") == str(1 << 29)
    assert environment_of(vllm(**given))["OMP_NUM_THREADS"] == "2"
    assert not {"--data-parallel-size", "--api-server-count"} & set(line_of())
    on_gpu = line_of(ON_GPU, at("spec.engine.dataParallelSize", 2))
    assert "--kv-cache-memory-bytes" not in on_gpu


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (vllm(), []),
        (vllm(prefixCaching=True), ["--enable-prefix-caching"]),
        (vllm(prefixCaching=False), ["--no-enable-prefix-caching"]),
    ],
)
def test_prefix_caching_is_the_engine_s_choice_until_it_is_given(
    change: Change, flags: list[str]
) -> None:
    assert [text for text in line_of(change) if text.endswith("prefix-caching")] == flags


def test_kv_memory_of_a_machine_without_an_accelerator_is_always_bounded() -> None:
    flag = "--kv-cache-memory-bytes"

    assert value(line_of(), flag) == str(1 << 30)
    assert flag not in line_of(ON_GPU)
    assert value(line_of(ON_GPU, vllm(kvCacheMemory="2Gi")), flag) == str(2 << 30)


def test_environment_has_the_user_s_values_over_ours_but_for_what_we_own() -> None:
    own = at(
        "spec.engine.env",
        [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "UCX_TLS", "value": "tcp"}],
    )
    found = environment_of(own)

    assert found == {
        "HF_HUB_OFFLINE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_TARGET_DEVICE": "cpu",
        "UCX_TLS": "tcp",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "8200",
    }
    assert environment_of(site=ON_A_LAPTOP)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


def test_vllm_loads_as_long_as_its_role_may_take_to_start() -> None:
    name, slow = "VLLM_ENGINE_READY_TIMEOUT_S", at("spec.roles.decode.startupTimeoutSeconds", 1800)

    assert environment_of(slow)[name] == "1800"
    assert environment_of(slow, at("spec.engine.env", [{"name": name, "value": "9"}]))[name] == "9"


def test_threads_of_engines_on_one_machine_are_not_bound_to_the_same_cores() -> None:
    threads = environment_of(at("spec.engine.threads", 2))

    assert (threads["OMP_NUM_THREADS"], threads["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")
    on_gpu = environment_of(both(at("spec.engine.threads", 2), ON_GPU))
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_TARGET_DEVICE"} & set(on_gpu)
