"""Make a GGUF file of a tiny model folder (tests/make_tiny_model.py), as llama.cpp's converter
would: `make_gguf.py MODEL_DIR FILE`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NORMAL, CONTROL, ADDED, BYTE = 1, 3, 4, 6


def make_gguf(
    folder: Path,
    file: Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    architecture: str | None = None,
    fields: Mapping[str, float] | None = None,
    end_of_turn: int | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the file of a llama, qwen2, qwen3 or gemma.  quantization: of matrices.

    architecture: what the file says; fields, tensors: written beside the model's own;
    end_of_turn: a token that ends an answer beside the one that ends the text
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture or kind)
    writer.add_name(folder.name)
    _add_config(writer, config)
    _add_tokenizer(writer, folder)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    for name, value in (fields or {}).items():
        writer.add_float32(f"{kind}.{name}", value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind),
        config["num_hidden_layers"],
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = _as_stored(kind, name, tensor, config).astype(np.float32)
        stored_as = quantization if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, gguf.quantize(data, stored_as), raw_dtype=stored_as)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if config["model_type"] != "gemma":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = {**tokenizer["model"]["vocab"], **added}
    kinds = {
        each["content"]: CONTROL if each["special"] else ADDED for each in tokenizer["added_tokens"]
    }
    in_order = sorted(tokens, key=tokens.__getitem__)
    if tokenizer["model"]["byte_fallback"]:  # sentencepiece's: without merges
        kinds |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(number) for number in range(len(in_order))])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_token_list(in_order)
    writer.add_token_types([kinds.get(token, NORMAL) for token in in_order])
    for role, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(tokens[settings[f"{role}_token"]])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _as_stored(kind: str, name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp keeps the rotary pairs of llama side by side, and gemma's norms as their factor."""
    if kind == "gemma" and "norm" in name:
        return tensor + 1
    if kind == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


if __name__ == "__main__":
    make_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
