"""Models that our decoder reads from config.json and safetensors alone, beside transformers' own
module of the same folder.
"""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.generic import Generic
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading import transformers_loader
from pdcluster_worker.model.loading.architecture import (
    ACTIVATIONS,
    FAMILIES,
    read_architecture,
)
from pdcluster_worker.model.loading.experts import ExpertNames, Mixture
from pdcluster_worker.model.loading.loader import DTYPES, load_model
from pdcluster_worker.model.loading.rotary import Rotary
from pdcluster_worker.model.loading.support import read_config
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.runner_loader import assemble
from pdcluster_worker.model.step_plan import StepLimits
from tests.make_tiny_model import make_config
from tests.worker.model.step_logits import BLOCK_SIZE, NUM_BLOCKS, step_logits

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)
KINDS = [
    "llama",
    "llama-mha",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "smollm3",
    "gemma",
    "mixtral",
    "qwen3-moe",
]
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.08}
"""Largest difference of the logits, relative to their size: rounding of another order."""


@pytest.fixture
def copied(tiny_folder, tmp_path):
    def copied(kind="llama", **fields):
        folder = shutil.copytree(tiny_folder(kind), tmp_path / "copied")
        config = {**json.loads((folder / "config.json").read_text()), **fields}
        kept = {name: value for name, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return copied


def load(folder, dtype="float32", **settings):
    return load_model(folder, dtype, block_size=BLOCK_SIZE, threads=1, **settings)


def logits_of(loaded):
    forward = assemble(
        loaded, KVCache(loaded.info.geometry, NUM_BLOCKS).tensor, LIMITS, invariant=False
    )
    return step_logits(forward, loaded.info.vocab_size)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen2", {"sliding_window": 24}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
        ("smollm3", {"sliding_window": 24}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 24, "no_rope_layers": [1, 0]}),
    ],
)
def test_windows_of_a_config_that_leaves_out_fields_are_those_of_transformers(kind, fields, copied):
    names = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
    folder = copied(kind, **{**dict.fromkeys(names, ...), **fields}, max_position_embeddings=8192)
    loaded = load(folder)
    assert loaded.checkpoint is not None
    config = read_config(folder)
    _, probed, _ = transformers_loader.load_module(folder, config, torch.float32, None)
    assert loaded.info.windows == probed.windows


def transformers_logits(folder, dtype, info):
    """By transformers' module over the plain operations."""
    cache = KVCache(info.geometry, NUM_BLOCKS)
    module, probed, _ = transformers_loader.load_module(
        folder, read_config(folder), DTYPES[dtype], info.max_model_len
    )
    assert probed.windows == info.windows
    forward = Generic(module, Reference(cache.tensor, probed.attention))
    return step_logits(forward, info.vocab_size), probed.attention, module


def assert_same_model(folder, dtype, **settings):
    loaded = load(folder, dtype, **settings)
    assert loaded.checkpoint is not None
    expected, attention, module = transformers_logits(folder, dtype, loaded.info)
    assert loaded.attention == attention
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert loaded.weight_bytes == parameters * DTYPES[dtype].itemsize
    difference = (logits_of(loaded) - expected).norm() / expected.norm()
    assert difference <= MAX_DIFFERENCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_computes_what_transformers_computes(kind, dtype, tiny_folder):
    assert_same_model(tiny_folder(kind), dtype, max_model_len=512)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
        ("qwen3", {"attention_bias": True}),
        ("mixtral", {"sliding_window": 24, "num_experts_per_tok": 1}),
        ("qwen3-moe", {"norm_topk_prob": False, "mlp_only_layers": None}),
        ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": None}),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 24}),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "mlp_bias": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
        ("gemma", {"hidden_act": "gelu", "attention_bias": True}),
    ],
)
def test_a_variant_of_a_family_computes_what_transformers_computes(kind, fields, tmp_path):
    config = make_config(kind)
    if kind == "qwen3" and "layer_types" in fields:
        fields = {**fields, "use_sliding_window": True, "sliding_window": 24}
    config = type(config)(**{**config.to_dict(), "layer_types": None, **fields})
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    module.save_pretrained(tmp_path)
    assert_same_model(tmp_path, "float32")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "truncate": False,
        },
        {
            "rope_type": "yarn",
            "factor": 0.5,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_transformers_bits(parameters, dtype):
    given = {"rope_theta": 10000.0, **parameters}
    config = transformers.LlamaConfig(rope_parameters=dict(given), head_dim=64)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    expected = theirs(torch.zeros(1, dtype=dtype), torch.arange(600)[None])
    found = Rotary.read({"rope_parameters": given}, 64, 10000.0).table(600, dtype)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other[0, :, :32].float())


def test_rotary_settings_of_older_configs_are_read():
    old = {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert Rotary.read(old, 64, 1e4) == Rotary(64, "linear", 2e4, old["rope_scaling"])


@pytest.mark.parametrize("fields", [{}, {"original_max_position_embeddings": 128}])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 1024}])
def test_the_length_before_scaling_is_found_where_transformers_finds_it(fields, inner):
    given = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, **inner}
    fields = {"max_position_embeddings": 4096, **fields}
    config = transformers.LlamaConfig(rope_parameters=dict(given), head_dim=64, **fields)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    found = Rotary.read({"rope_parameters": given, **fields}, 64, 10000.0)
    assert torch.equal(found.frequencies()[0], theirs.inv_freq)


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_of_a_family_are_those_of_transformers(kind):
    config = transformers.CONFIG_MAPPING[kind]()
    needed = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "moe_intermediate_size",
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
        )
        if hasattr(config, name)
    }
    found = read_architecture({"model_type": kind, **needed}, 8192)
    assert found.is_tied == config.tie_word_embeddings
    assert found.epsilon == config.rms_norm_eps
    own = "clamped_silu" if kind == "gpt_oss" else ACTIVATIONS[config.hidden_act]
    assert found.activation == own
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert found.attention.head_dim == head_dim
    assert found.rotary.theta == config.rope_parameters["rope_theta"]
    assert found.rotary.kind == config.rope_parameters["rope_type"]
    assert found.has_out_bias == getattr(config, "attention_bias", False)
    assert found.has_mlp_bias == getattr(config, "mlp_bias", False)
    windows = {"mistral": {4096}, "gpt_oss": {128, None}}.get(kind, {None})
    assert {*found.windows} == windows
    if kind in ("qwen3_moe", "mixtral"):
        normalizes = getattr(config, "norm_topk_prob", True)
        assert found.mixture is not None
        assert (found.mixture.normalizes, {*found.mixture.is_mixed}) == (normalizes, {True})
    if kind == "smollm3":
        assert found.rotates == tuple(map(bool, config.no_rope_layers))


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("olmo2", {}, "model type olmo2 is not one of llama"),
        ("llama", {"hidden_act": "relu"}, "hidden_act relu is not one of silu"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ("llama", {"num_attention_heads": 3}, "its heads do not divide"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0"),
        ("llama", {"max_position_embeddings": ...}, "max_position_embeddings is missing"),
        ("llama", {"max_position_embeddings": "64"}, "max_position_embeddings is 64"),
        ("llama", {"layer_types": 5}, "a field of config.json has a wrong type: 'int' object"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "its rotary embedding is longr"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters is [1]"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "its rotary embedding cannot be"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "its rotary embedding cannot be"),
        ("llama", {"partial_rotary_factor": 0.5}, "its rotary embedding is default, not"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types names 1 of 2 layers"),
        ("qwen2-window", {"sliding_window": None}, "sliding_window None is no window"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers names 1 of 2 layers"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen3-moe", {"num_experts": "8"}, "num_experts is '8'"),
        ("qwen3-moe", {"num_local_experts": ...}, "num_local_experts is missing"),
    ],
)
def test_what_our_decoder_does_not_compute_is_left_to_transformers(
    kind, fields, reason, copied, caplog
):
    folder = copied(kind, **fields)
    caplog.set_level(logging.INFO)
    try:
        loaded = load(folder)
    except ModelError:
        pass  # transformers refuses it too
    else:
        assert reason in loaded.reason
        assert logits_of(loaded) is not None
    assert f"loaded by transformers' code, which is slower: {reason}" in caplog.text


def rename(weights):
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def drop_norm(weights):
    return {name: weight for name, weight in weights.items() if name != "model.norm.weight"}


def quantize(weights):
    name = "model.layers.0.mlp.up_proj.weight"
    return {**weights, name: weights[name].to(torch.int8)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename, "its files lack weights: model.embed_tokens.weight"),
        (drop_norm, "its files lack weights: model.norm.weight"),
        (quantize, "model.layers.0.mlp.up_proj.weight is torch.int8 [128, 64], not [128, 64]"),
    ],
)
def test_files_with_other_weights_are_left_to_transformers(change, reason, copied, caplog):
    folder = copied()
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    caplog.set_level(logging.INFO)
    if change is drop_norm:
        with pytest.raises(ModelError, match=r"its weights lack 1 tensors of config\.json"):
            load(folder)
    else:
        assert load(folder).checkpoint is None
    assert reason in caplog.text


def test_pickled_weights_are_left_to_transformers(copied):
    folder = copied()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load(folder).reason == "its weights are not in safetensors files"


def test_a_head_that_differs_from_its_embedding_is_left_to_transformers(copied):
    folder = copied("gemma")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).checkpoint is not None
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight differs from the embedding" in load(folder).reason


def test_weights_in_several_files_are_read(copied):
    folder = copied()
    weights = load_file(folder / "model.safetensors")
    expected = logits_of(load(folder))
    (folder / "model.safetensors").unlink()
    files = {}
    for number, (name, weight) in enumerate(weights.items()):
        files.setdefault(f"part-{number % 2}.safetensors", {})[name] = weight
    for file, part in files.items():
        save_file(part, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(load(folder)), expected)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": null}}'])
def test_a_malformed_index_is_named(index, copied):
    folder = copied()
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="cannot load weights of"):
        load(folder)


def test_weights_stay_in_the_dtype_of_their_files_until_they_are_packed(tiny_folder):
    tensors = load(tiny_folder("llama"), "bfloat16").checkpoint.tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_an_engine_with_our_decoder_imports_nothing_of_transformers(tiny_folder):
    program = f"""
import sys
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.model.runner_loader import open_runner
model = ModelConfig(name="m", path={str(tiny_folder("llama"))!r}, dtype="float32")
runner, _, _ = open_runner(model, EngineConfig(num_blocks=8, threads=1))
assert runner.forward.code == "decoder"
heavy = ("transformers", "torch._dynamo", "torch.distributed.tensor")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=os.environ
    )
    assert done.stdout == "[]\n"


def test_experts_of_a_step_take_the_memory_that_the_models_page_says() -> None:
    names = ExpertNames(router="gate", each="experts")
    mixtral = Mixture(names, 8, 2, inner=14336, normalizes=True, is_mixed=(True,))
    assert round(mixtral.step_bytes(256, 4096, torch.bfloat16) / 1e6) == 60
    assert round(mixtral.step_bytes(8192, 4096, torch.bfloat16) / 1e8) == 19
