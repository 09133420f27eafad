"""gpt-oss by our decoder, beside transformers: sinks, stacked experts, MXFP4."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.experts import read_mxfp4
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.runner_loader import assemble
from pdcluster_worker.model.step_plan import StepLimits
from tests.worker.model.step_logits import BLOCK_SIZE, LENGTHS, NUM_BLOCKS, step_logits, tokens_of

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)
STACKS = ("gate_up_proj", "down_proj")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def load(folder, dtype="float32", **settings):
    sizes = {"block_size": BLOCK_SIZE, "threads": 1, "max_model_len": 512}
    return load_model(folder, dtype, **sizes, **settings)


def logits_of(loaded):
    cache = KVCache(loaded.info.geometry, NUM_BLOCKS)
    return step_logits(
        assemble(loaded, cache.tensor, LIMITS, invariant=False), loaded.info.vocab_size
    )


@pytest.fixture
def as_mxfp4(tiny_folder, tmp_path):
    """The tiny model with its experts in MXFP4, and the same numbers in float32."""
    folders = [tmp_path / name for name in ("mxfp4", "dense")]
    for folder in folders:
        shutil.copytree(tiny_folder("gpt-oss"), folder)
    packed, dense = (load_file(folder / "model.safetensors") for folder in folders)
    for name in [name for name in dense if name.endswith(STACKS)]:
        blocks, scales, numbers = mxfp4(packed.pop(name).transpose(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = numbers.transpose(1, 2).contiguous()
    for folder, tensors in zip(folders, (packed, dense), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folders[0] / "config.json").write_text(json.dumps(config))
    return folders


def mxfp4(weight):
    """Blocks, scales and the numbers that they stand for; 32 columns are a group."""
    grouped = weight.unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1, keepdim=True).div(6).log2().ceil()
    scaled = grouped / exponents.exp2()
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    numbers = (E2M1[codes] * scaled.sign() * exponents.exp2()).flatten(-2)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8).unflatten(-1, (16, 2))
    blocks = codes[..., 0] | codes[..., 1] << 4
    return blocks, (exponents.squeeze(-1) + 127).to(torch.uint8), numbers


def transformers_logits(folder, **options):
    """The rows of `step_logits`, each sequence by itself."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager", **options
    )
    with torch.inference_mode():
        vocab_size = model.config.vocab_size
        sequences = [tokens_of(number, vocab_size) for number in range(len(LENGTHS))]
        return torch.cat([model(torch.tensor([each])).logits[0].float() for each in sequences])


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.08)])
def test_it_computes_what_transformers_computes(dtype, most, tiny_folder):
    folder = tiny_folder("gpt-oss")
    loaded = load(folder, dtype)
    assert loaded.checkpoint is not None
    assert loaded.info.windows == (24, None)
    expected = transformers_logits(folder)
    assert (logits_of(loaded) - expected).norm() / expected.norm() <= most


def test_mxfp4_is_read_as_the_numbers_it_stands_for(as_mxfp4):
    packed, dense = map(load, as_mxfp4)
    assert (packed.info.precision, dense.info.precision) == ("mxfp4", "float32")
    assert packed.weight_bytes < dense.weight_bytes
    torch.testing.assert_close(logits_of(packed), logits_of(dense), rtol=1e-5, atol=1e-5)


def test_mxfp4_is_read_as_transformers_reads_it(as_mxfp4):
    from transformers import Mxfp4Config

    expected = transformers_logits(as_mxfp4[0], quantization_config=Mxfp4Config(dequantize=True))
    found = logits_of(load(as_mxfp4[0]))
    assert (found - expected).norm() / expected.norm() <= 1e-2  # of bfloat16 on their way


def test_weights_are_quantized_while_loading(tiny_folder):
    folder = tiny_folder("gpt-oss")
    dense, quantized = load(folder), load(folder, quantization="int8")
    assert quantized.weight_bytes < 0.6 * dense.weight_bytes
    found, expected = logits_of(quantized), logits_of(dense)
    assert (found - expected).norm() / expected.norm() <= 0.3


def test_mxfp4_is_not_quantized_again(as_mxfp4):
    with pytest.raises(
        ModelError, match=r"engine.quantization is int8, .* in mxfp4 already: leave"
    ):
        load(as_mxfp4[0], quantization="int8")


def test_a_scale_that_is_not_finite_is_refused():
    scales = torch.full((2, 1), 127, dtype=torch.uint8)
    scales[1] = 255
    with pytest.raises(ModelError, match="stack has scales that are not finite: copy the model"):
        read_mxfp4("stack", torch.zeros(2, 1, 16, dtype=torch.uint8), scales)


def test_mxfp4_of_another_shape_is_refused(as_mxfp4):
    path = as_mxfp4[0] / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj is torch.uint8 .* not bytes \[8, 64, 3, 16\]"):
        load(as_mxfp4[0])


def test_mxfp4_of_a_model_without_stacked_experts_is_refused(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copied")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mxfp4, and the model has no experts in one tensor"):
        load(folder)


@pytest.mark.parametrize("field", ["swiglu_alpha", "swiglu_limit"])
def test_another_activation_is_refused(field, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("gpt-oss"), tmp_path / "copied")
    config = json.loads((folder / "config.json").read_text())
    config[field] = 2.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{field} is 2.0, not .* attention sinks .* engine.type"):
        load(folder)
