"""docs/models.md: its types and fields are those of the code, and types are served as it says."""

import re
from pathlib import Path

import pytest
import transformers

from pdcluster_worker.fetch.gguf_file import ARCHITECTURES
from pdcluster_worker.model.loading.architecture import FAMILIES
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.loading.quantization import FORMATS
from pdcluster_worker.model.loading.support import KINDS_BY_FIELD

PAGE = (Path(__file__).parents[4] / "docs/models.md").read_text()
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128}


def names(start: str) -> list[str]:
    """In backticks, from a text to the end of its column, or paragraph."""
    _, found, after = PAGE.partition(start)
    assert found, start
    return re.findall(r"`(\w+)`", re.split(r"\||\. |\n\n|, and", after)[0])


def test_types_of_our_decoder_are_all_there() -> None:
    assert set(names("| our decoder | ")) == set(FAMILIES)


def test_fields_of_refused_kinds_are_all_there() -> None:
    assert [field for field in KINDS_BY_FIELD if f"`{field}`" not in PAGE] == []


def test_formats_of_quantized_weights_are_all_there() -> None:
    assert [form for form in FORMATS if f"`{form}`" not in PAGE] == []


def test_architectures_of_gguf_files_are_all_there() -> None:
    assert names("Architectures: ") == list(ARCHITECTURES)


@pytest.mark.parametrize("kind", names("| transformers' module, with our attention | "))
def test_types_of_transformers_code_are_served_by_it(kind: str, tmp_path: Path) -> None:
    sizes = GPT2 if kind == "gpt2" else SMALL
    config = transformers.AutoConfig.for_model(kind, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", block_size=16, max_model_len=64)

    assert loaded.module is not None
    assert loaded.reason
