"""Tiny random models that take images, in the forms of LLaVA and of Qwen2-VL, and their images."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make_tiny_model import SIZES, make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 112  # pixels of an image, which is 16 tokens of either model

QWEN_IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def png(red: int, green: int, blue: int) -> str:
    """URL of an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, green, blue)) * SIDE) * SIDE
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    content = b"".join([b"\x89PNG\r\n\x1a\n", *parts])
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def make_llava(folder: Path) -> Path:
    import transformers

    tokenizer = _tokenizer(["<image>"], "<image>")
    (image,) = _ids(tokenizer, "<image>")
    text = transformers.LlamaConfig(
        **{**SIZES, "head_dim": 32, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        vision_feature_layer=-1,
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    _write(transformers.LlavaForConditionalGeneration, config, folder, "vision", "projector")
    weights = folder / "model.safetensors"
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor  # vLLM's name
        for name, tensor in load_file(weights).items()
    }
    save_file(named, weights, {"format": "pt"})
    side = {"height": 28, "width": 28}
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": side,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 7,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<image>",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer.save_pretrained(folder)
    return folder


def make_qwen(folder: Path) -> Path:
    import transformers

    tokenizer = _tokenizer([*QWEN_IMAGE, "<|video_pad|>"], "".join(QWEN_IMAGE))
    start, image, end, video = _ids(tokenizer, *QWEN_IMAGE, "<|video_pad|>")
    text = {
        **SIZES,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    _write(transformers.Qwen2VLForConditionalGeneration, config, folder, "visual")
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": SIDE * SIDE,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(special: list[str], image: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _ids(tokenizer: Any, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def _write(kind: Any, config: Any, folder: Path, *seeing: str) -> None:
    """seeing: in names of weights that are drawn wide, so that images make a difference."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).float()
        for name, parameter in model.named_parameters():
            if any(part in name for part in seeing):
                parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
