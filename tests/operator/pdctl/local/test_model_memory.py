"""Pools that a model's folder says cannot start, and those that hold fewer requests."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdctl.cli.main import app
from pdctl.local.model_memory import check_memory, local_folder, read_folder
from tests.schema.model_configs import DEEPSEEK_R1, GPT_OSS_120B, HEADS, LLAMA_70B
from tests.schema.object_cases import minimal

GB = 10**9
VLLM = {"type": "vllm", "image": "vllm/vllm-openai:v0.32.0"}


def folder(
    path: Path, config: dict[str, Any], gigabytes: float = 0.0, dtype: str = "bfloat16"
) -> Path:
    """A model whose weights are a sparse file."""
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"max_position_embeddings": 131072, "dtype": dtype, **config})
    (path / "config.json").write_text(text)
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(int(gigabytes * GB))
    return path


def cluster(gpu: str, engine: dict[str, Any], **spec: Any) -> PDCluster:
    document = minimal()
    roles = {"mixed": {"pools": [{"name": "m", "gpu": gpu, "replicas": 1}]}}
    document["spec"] |= {"engine": engine, "roles": roles, **spec}
    return parse(document)


def warnings_of(of: PDCluster, model: Path) -> list[str]:
    """Warnings, or faults after `refused`."""
    try:
        return [str(each) for each in check_memory(of, model)]
    except InvalidObjectError as e:
        return ["refused", *map(str, e.faults)]


def test_a_length_that_no_worker_holds_is_refused_with_the_largest_that_it_does(
    tmp_path: Path,
) -> None:
    """On two H200: 126.9 GB of each, 110 of weights, half of 327,680 bytes a token."""
    model = folder(tmp_path, LLAMA_70B, 220.0)
    engine = {**VLLM, "tensorParallelSize": 2, "maxModelLen": 131072, "deviceMemoryShare": 0.9}

    largest = int((0.9 * 141 * GB - 110 * GB) // (327680 / 2))
    assert warnings_of(cluster("H200", engine), model) == [
        "refused",
        "spec.engine.maxModelLen: is 131072, and one request of that length takes 21.5 GB of KV in "
        "each accelerator, and mixed/m (2 x H200) has 16.9 GB for it: 0.9 of its memory is 127 GB, "
        f"and weights take 110 GB (by {tmp_path}); set engine.maxModelLen to at most {largest}, or "
        "raise engine.tensorParallelSize, or use accelerators with more memory",
    ]
    assert warnings_of(cluster("H200", engine | {"maxModelLen": largest}), model) == []
    assert (
        warnings_of(cluster("H200", engine | {"maxModelLen": largest + 1}), model)[0] == "refused"
    )


@pytest.mark.parametrize(
    ("gpu", "engine", "config", "gigabytes", "fault"),
    [
        ("H100", VLLM, LLAMA_70B, 141.0, "one request of 131072 tokens takes 42.9 GB of KV"),
        ("H100", {}, LLAMA_70B, 141.0, "one request of 64 tokens takes 0.0262 GB of KV"),
        ("B200", {}, LLAMA_70B, 141.0, None),  # the worker lowers the length that none asks for
        ("H100", {**VLLM, "tensorParallelSize": 4}, LLAMA_70B, 141.0, None),
        (
            "H100",
            {**VLLM, "pipelineParallelSize": 2, "maxModelLen": 32768},
            LLAMA_70B,
            141.0,
            "is 32768, and one request of that length takes 5.37 GB of KV in each accelerator, "
            "and mixed/m (2 x H100) has 3.1 GB",
        ),
        ("H100", {**VLLM, "args": ["-q", "fp8"], "maxModelLen": 4096}, LLAMA_70B, 141.0, None),
        ("H100", {"maxModelLen": 4096}, LLAMA_70B, 141.0, "has 0 GB for it"),
        ("H100", {"maxModelLen": 4096, "quantization": "int8"}, LLAMA_70B, 141.0, None),
        ("H200", {**VLLM, "tensorParallelSize": 8}, DEEPSEEK_R1, 688.0, None),
        ("H100", {**VLLM, "tensorParallelSize": 8}, DEEPSEEK_R1, 688.0, "has 0 GB for it"),
        ("H100", VLLM, {**GPT_OSS_120B, "quantization_config": {"a": 1}}, 65.0, None),
        ("cpu", {"maxModelLen": 131072}, LLAMA_70B, 0.0, "mixed/m have 1.07 GB for it"),
        ("cpu", {"maxModelLen": 2048}, LLAMA_70B, 0.0, None),
        ("cpu", {"maxModelLen": 2048, "numBlocks": 64}, LLAMA_70B, 0.0, "set engine.maxModelLen"),
        ("H100", {**VLLM, "args": ["--cpu-offload-gb", "90"]}, LLAMA_70B, 141.0, None),
        ("own", {**VLLM}, LLAMA_70B, 900.0, None),  # memory of its type is not known
    ],
)
def test_a_pool_is_refused_where_weights_and_one_request_do_not_fit(
    tmp_path: Path,
    gpu: str,
    engine: dict[str, Any],
    config: dict[str, Any],
    gigabytes: float,
    fault: str | None,
) -> None:
    model = folder(tmp_path, config, gigabytes)
    accelerators = {"own": {"resource": "x.example/gpu"}}

    found = warnings_of(cluster(gpu, engine, accelerators=accelerators), model)

    assert ("refused" in found) == (fault is not None)
    assert fault is None or fault in found[1]


def test_memory_is_what_the_object_says_of_its_type(tmp_path: Path) -> None:
    model, engine = folder(tmp_path, LLAMA_70B, 141.0), {**VLLM, "maxModelLen": 8192}

    for memory, refused in ((100 * GB, True), (200 * GB, False)):
        own = {"own": {"resource": "x.example/gpu", "memoryBytes": memory}}
        assert bool(warnings_of(cluster("own", engine, accelerators=own), model)) == refused


def test_fewer_requests_of_the_full_length_than_max_sequences_are_a_warning(tmp_path: Path) -> None:
    model = folder(tmp_path, {**LLAMA_70B, "max_position_embeddings": 8192}, 141.0)
    engine = {**VLLM, "tensorParallelSize": 4, "maxSequences": 128}

    fitting = int((0.92 * 80 * GB - 141 * GB / 4) // (8192 * 327680 / 4))
    assert warnings_of(cluster("H100", engine), model) == [
        f"spec.roles.mixed.pools[0].gpu: has KV for {fitting} x 8192 tokens, and maxSequences is "
        "128: more requests of that length wait, or are preempted; nothing to do where requests "
        "are shorter"
    ]
    assert warnings_of(cluster("H100", engine | {"maxSequences": fitting}), model) == []


@pytest.mark.parametrize(
    ("args", "config", "factor"),
    [
        ([], {}, 1),
        (["--kv-cache-dtype", "fp8"], {}, 2),
        (["--kv-cache-dtype", "bfloat16"], {}, 1),
        ([], {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 2),
    ],
)
def test_kv_of_eight_bits_takes_half(
    tmp_path: Path, args: list[str], config: dict[str, Any], factor: int
) -> None:
    model = folder(tmp_path, {**LLAMA_70B, "max_position_embeddings": 1 << 20, **config})
    largest = int(0.92 * 80 * GB) // 327680 * factor
    engine = {**VLLM, "args": args}

    assert warnings_of(cluster("H100", engine | {"maxModelLen": largest - 8}), model) == []
    assert warnings_of(cluster("H100", engine | {"maxModelLen": largest + 8}), model) != []


@pytest.mark.parametrize(
    ("kind", "row_bytes"), [("auto", 256), ("bf16", 256), ("int8", 132), ("fp8_e4m3", 132)]
)
def test_kv_of_our_engine_takes_what_its_dtype_does(
    tmp_path: Path, kind: str, row_bytes: int
) -> None:
    """A model with 80 layers, 8 KV heads and heads of 128; one block is to spare."""
    model = folder(tmp_path, {**LLAMA_70B, "max_position_embeddings": 1 << 20}, 1.0)
    engine = {"kvCacheDtype": kind, "kvCacheMemory": 10 * GB}
    largest = (10 * GB // (16 * 80 * 8 * 2 * row_bytes) - 1) * 16

    assert not any(
        "refuse" in one or "takes" in one
        for one in warnings_of(cluster("H100", engine | {"maxModelLen": largest}), model)
    )
    assert (
        warnings_of(cluster("H100", engine | {"maxModelLen": largest + 1}), model)[0] == "refused"
    )


def test_units_that_a_type_lacks_are_a_warning_without_a_folder() -> None:
    engine = {**VLLM, "args": ["--quantization", "fp8"]}

    (found,) = check_memory(cluster("A100-80GB", engine), None)

    assert str(found).startswith(
        "spec.roles.mixed.pools[0].gpu: A100-80GB has no units for FP8, so --quantization fp8"
    )


def test_a_folder_is_the_objects_own_or_one_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = {"name": "org/m", "huggingFace": {"repo": "org/m"}}
    hub, own = cluster("cpu", {}, model=model), cluster("cpu", {}, model={"name": "m", "path": "a"})
    file = tmp_path / "chat.yaml"

    assert (local_folder(hub, file), local_folder(own, file)) == (None, None)
    here = folder(tmp_path / "a", HEADS)
    cached = folder(tmp_path / "home" / ".cache" / "pdcluster" / "org--m", HEADS)
    assert (local_folder(hub, file), local_folder(own, file)) == (cached, here)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"quantization_config": 3, "head_dim": 8}'])
def test_a_config_that_says_nothing_judges_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    assert read_folder(tmp_path) is None
    assert check_memory(cluster("H100", VLLM), tmp_path) == []


@pytest.mark.parametrize("command", [["validate"], ["plan", "--against", "same", "-f"], ["up"]])
def test_commands_refuse_what_cannot_start_and_name_the_file(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = folder(tmp_path / "model", LLAMA_70B)
    too_long = cluster("cpu", {"maxModelLen": 8192}, model={"name": "m", "path": str(model)})
    file = tmp_path / "chat.yaml"
    file.write_text(too_long.model_dump_json(by_alias=True, exclude_unset=True))
    command = [str(file) if part == "same" else part for part in command]
    state = ["--state-dir", str(tmp_path / "state")] if command == ["up"] else []

    found = CliRunner().invoke(app, [*command, str(file), *state])

    assert found.exit_code == 2
    assert found.stderr.startswith(f"error: {file}: spec.engine.maxModelLen: is 8192, and one ")
    assert found.stderr.endswith(
        "set engine.maxModelLen to at most 3248, or raise engine.kvCacheMemory\n"
    )


def test_a_warning_leaves_a_file_valid(tmp_path: Path) -> None:
    engine = {**VLLM, "args": ["--quantization", "fp8"]}
    file = tmp_path / "chat.yaml"
    valid = cluster("A100-80GB", engine)
    file.write_text(valid.model_dump_json(by_alias=True, exclude_unset=True))

    found = CliRunner().invoke(app, ["validate", str(file)])

    assert found.exit_code == 0
    assert found.stderr.startswith(f"warning: {file}: spec.roles.mixed.pools[0].gpu: A100-80GB has")


def test_weights_that_a_link_leads_to_nowhere_count_as_none(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA_70B, 1.0)
    (model / "model-2.safetensors").symlink_to(tmp_path / "absent")

    found = read_folder(model)
    assert found is not None
    assert found.num_bytes == GB
