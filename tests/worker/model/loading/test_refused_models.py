"""Every kind of model that we do not run is refused with the reason, from its config where the
config states it.
"""

import json
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.loader import context_limit, load_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

KINDS = [
    ({"model_type": "t5"}, "encoder-decoder"),
    ({"model_type": "bart"}, "encoder-decoder"),
    ({"model_type": "deepseek_v3"}, "latent attention .kv_lora_rank"),
    (
        {"model_type": "mamba"},
        r"state-space.*only decoder-only models .*: set model\.path to one, or engine\.type: vllm",
    ),
    ({"model_type": "jamba"}, "state-space"),
    ({"model_type": "qwen3_next"}, "linear_attention"),
    ({"model_type": "recurrent_gemma"}, "recurrent"),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "conv"),
    ({"model_type": "llava"}, "multimodal .*vision_config"),
    ({"model_type": "qwen2_audio"}, "multimodal .*audio_config"),
    (
        {"model_type": "llama", "architectures": ["LlavaForConditionalGeneration"]},
        "encoder-decoder or multimodal",
    ),
    ({"model_type": "bloom", "n_positions": 256}, "ALiBi"),
    ({"model_type": "mpt"}, "ALiBi"),
    ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "pooling or classification",
    ),
    ({"model_type": "llama", "architectures": ["LlamaModel"]}, "pooling or classification"),
    ({"model_type": "vit"}, "no causal language model"),
    (
        {"model_type": "gemma2", "sliding_window": 256},
        "attn_logit_softcapping=50.0.*: set model.path to one",
    ),
    ({"model_type": "gpt_oss", "sliding_window": 256}, "attention sinks"),
    (
        {"model_type": "gemma3_text", "sliding_window": 256, "use_bidirectional_attention": True},
        "bidirectional",
    ),
    (
        {
            "model_type": "llama",
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
        },
        "rope_type dynamic .*: set engine.maxModelLen to at most 64$",
    ),
]


@pytest.mark.parametrize(
    ("fields", "reason"),
    KINDS,
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_kind_is_refused_from_its_config_alone(tmp_path, fields, reason):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **fields}))
    (tmp_path / "model.safetensors").touch()  # never read
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, "float32", block_size=16)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"m.Q4_0.gguf": ""}, r"m\.Q4_0\.gguf is GGUF, .*fetch\.gguf_file FILE FOLDER"),
        ({"a": ""}, r"no config\.json"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": "[]"}, "no model_type"),
        ({"config.json": '{"model_type": 3}'}, "no model_type"),
        ({"config.json": '{"model_type": "llama"}'}, "has no weights"),
        (
            {"config.json": '{"model_type": "nosuch"}', "model.safetensors": ""},
            r"cannot read model type nosuch: set model\.path to",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, files, reason):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, "float32", block_size=16)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"does not exist: set model\.path"):
        load_model(tmp_path / "nowhere", "float32", block_size=16)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"\x40" + bytes(7) + b"{}", "cut short"),
        (b"\xff" * 64, "not a"),
    ],
)
def test_broken_weights_are_refused(tmp_path, tiny_folder, content, reason):
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, "float32", block_size=16)


def test_weights_cut_after_the_header_are_refused(tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot load weights"):
        load_model(folder, "float32", block_size=16)


def test_context_is_the_lower_of_model_and_setting_and_one_is_needed():
    with pytest.raises(ModelError, match=r"set engine\.maxModelLen"):
        context_limit({"model_type": "x", "max_position_embeddings": None}, None)
    assert context_limit({"model_type": "x"}, 100) == 100
    assert context_limit({"max_position_embeddings": 50}, 100) == 50


def save(config, folder):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_layers_that_call_attention_twice_are_refused_by_the_dry_run(tmp_path):
    with pytest.raises(ModelError, match="runs twice"):
        load_model(save(transformers.DiffLlamaConfig(**SMALL), tmp_path), "float32", block_size=16)


def test_code_that_does_not_reach_our_attention_is_refused_by_the_dry_run(tmp_path):
    with pytest.raises(ModelError, match="does not hand keyword arguments on"):
        load_model(save(transformers.StableLmConfig(**SMALL), tmp_path), "float32", block_size=16)


def test_code_with_its_own_attention_is_refused(tmp_path):
    config = transformers.GPTJConfig(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        rotary_dim=8,
        bos_token_id=0,
        eos_token_id=1,
    )
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        load_model(save(config, tmp_path), "float32", block_size=16)


@pytest.mark.parametrize("window", [256, None])
def test_sliding_window_that_covers_the_context_is_served(tmp_path, window):
    folder = save(transformers.MistralConfig(**SMALL, sliding_window=window), tmp_path)
    assert load_model(folder, "float32", block_size=16).info.max_model_len == 256


def test_sliding_window_of_each_layer_is_known(tmp_path):
    folder = save(transformers.MistralConfig(**SMALL, sliding_window=64), tmp_path)
    assert load_model(folder, "float32", block_size=16).info.windows == (64, 64)
    assert load_model(folder, "float32", block_size=16, max_model_len=64).info.windows == (
        None,
        None,
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        # llama's code has no windows
        (
            {"sliding_window": 64},
            "sliding_window=64 is on, but its code .*maxModelLen to at most 64",
        ),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window=64",
        ),
    ],
)
def test_window_that_the_models_code_does_not_ask_for_is_refused(tmp_path, fields, reason):
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, "float32", block_size=16)
    assert load_model(tmp_path, "float32", block_size=16, max_model_len=64).info.windows == (
        None,
        None,
    )


@pytest.mark.parametrize("change", ["a tensor is gone", "a layer more than the file holds"])
def test_weights_that_lack_tensors_are_refused(tmp_path, tiny_folder, change):
    """transformers would fill them with random numbers, other ones in each worker."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    if change == "a tensor is gone":
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        reason = r"lack 1 tensors of config\.json, model\.layers\.1\.mlp\.up_proj\.weight first"
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 3, "layer_types": None})
        )
        reason = r"lack \d+ tensors of config\.json, model\.layers\.2"
    with pytest.raises(ModelError, match=reason):
        load_model(folder, "float32", block_size=16)
