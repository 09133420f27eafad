"""LoRA adapters that do not fit the model: each is refused by its name, with both values."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from pdcluster_worker.config.worker import WorkerConfig, load_worker_config
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.stock_engine.adapters import check_adapters
from tests.worker.config.engine_files import MINIMUM, write

HIDDEN, KV = 64, 32
BASE = "org/base"


def adapter(
    folder: Path, module: str = "v_proj", inputs: int = HIDDEN, outputs: int = KV, **settings: Any
) -> None:
    folder.mkdir(exist_ok=True)
    name, rank = f"base_model.model.model.layers.0.self_attn.{module}", settings.get("r", 8)
    weights = {
        f"{name}.lora_A.weight": torch.zeros(rank, inputs),
        f"{name}.lora_B.weight": torch.zeros(outputs, rank),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": rank, "base_model_name_or_path": BASE, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    """Settings of a model with the folder of one adapter, which each test makes."""
    weights = {
        "model.layers.0.self_attn.v_proj.weight": torch.zeros(KV, HIDDEN),
        "model.layers.0.self_attn.packed.weight": torch.zeros(KV, 8, dtype=torch.uint8),
        "model.layers.0.self_attn.k_proj.qweight": torch.zeros(8, KV, dtype=torch.int32),
        "model.layers.0.self_attn.o_proj.weight_packed": torch.zeros(KV, 8, dtype=torch.int32),
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, HIDDEN, KV),
    }
    save_file(weights, tmp_path / "model-00001-of-00001.safetensors")
    folders = {"sql": str(tmp_path / "sql"), "in-the-image": "/no/such/folder"}
    vllm = json.dumps({"adapters": folders, "maxLoraRank": 16})
    file = write(tmp_path, f"{MINIMUM}engine: {{type: vllm, vllm: {vllm}}}\n")
    loaded = load_worker_config(file)
    model = msgspec.structs.replace(loaded.model, name="chat", path=str(tmp_path))
    return msgspec.structs.replace(loaded, model=model)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"r": 16, "rank_pattern": {"v_proj": 4}},
        {"module": "packed", "inputs": 999},  # its stored shape is not its own
        {"module": "k_proj", "inputs": 999},
        {"module": "o_proj", "inputs": 999},
        {"module": "experts.base_layer", "inputs": 999},
        {"module": "v_proj.base_layer"},
    ],
    ids=str,
)
def test_one_that_fits_is_taken(config: WorkerConfig, tmp_path: Path, fields: Any) -> None:
    adapter(tmp_path / "sql", **fields)
    check_adapters(config)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"r": 33},
            "adapter sql has rank 33, and engine.args take at most 16 (--max-lora-rank): set "
            "--max-lora-rank 64 there",
        ),
        ({"rank_pattern": {"v_proj": 600}}, "has rank 600, .* give one of a lower rank"),
        (
            {"inputs": 128},
            "adapter sql is of org/base, and not of chat: model.layers.0.self_attn.v_proj has 128 "
            "inputs, and in the model 64; give an adapter of this model, or leave it out of "
            "model.adapters",
        ),
        ({"outputs": 64}, "v_proj has 64 outputs, and in the model 32; give"),
        ({"module": "v_proj.base_layer", "outputs": 64}, "v_proj has 64 outputs, and in the model"),
        ({"module": "qkv"}, "not of chat: it changes qkv, which the model lacks; give"),
        ({"base_model_name_or_path": None, "outputs": 1}, "is of another model, and not of chat"),
        ({"rank_pattern": {"v_proj": "x"}}, "is no folder of a LoRA adapter of PEFT: invalid"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_one_that_does_not_fit_is_refused(
    config: WorkerConfig, tmp_path: Path, fields: Any, said: str
) -> None:
    adapter(tmp_path / "sql", **fields)
    pattern = ".*".join(re.escape(part) for part in said.split(".*"))
    with pytest.raises(ConfigError, match=pattern):
        check_adapters(config)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_of_weights_in_a_file_of_torch_the_rank_alone_is_checked(
    config: WorkerConfig, tmp_path: Path, suffix: str
) -> None:
    adapter(tmp_path / "sql", module="qkv")
    weights = tmp_path / "sql/adapter_model.safetensors"
    weights.rename(weights.with_suffix(suffix))
    check_adapters(config)

    (tmp_path / "sql/adapter_config.json").write_text('{"r": 32}')
    with pytest.raises(ConfigError, match="adapter sql has rank 32"):
        check_adapters(config)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"{", b"[]      \xff\xff\xff\xff\xff\xff\xff\xff"])
def test_a_folder_without_an_adapter_is_refused(
    config: WorkerConfig, tmp_path: Path, name: str, content: bytes | None
) -> None:
    adapter(tmp_path / "sql")
    file = tmp_path / "sql" / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"adapter sql: .* is no folder of a LoRA adapter"):
        check_adapters(config)


def test_a_model_without_safetensors_is_left_to_the_engine(
    config: WorkerConfig, tmp_path: Path
) -> None:
    adapter(tmp_path / "sql", module="qkv", inputs=1)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"not")
    check_adapters(config)
