"""Checkpoints with weights in 8 bits: what they compute, what they take, and what is refused."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.loading.quantization import read_schemes, scheme_of
from pdcluster_worker.model.ops.quantized_weight import QuantizedWeight
from pdcluster_worker.model.runner_loader import assemble
from pdcluster_worker.model.step_plan import StepLimits
from tests.make_quantized_model import KINDS, make_quantized_model, settings
from tests.worker.model.step_logits import BLOCK_SIZE, NUM_BLOCKS, step_logits

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)
QUANTIZED = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)  # weights of two layers


@pytest.fixture
def write(tiny_folder, tmp_path):
    def write(name, kind="qwen2", *, dense=False):
        target = tmp_path / ("dense" if dense else "quantized")
        return make_quantized_model(name, tiny_folder(kind), target, dense=dense)

    return write


def load(folder, dtype="float32", **settings):
    sizes = {"block_size": BLOCK_SIZE, "threads": 1, "max_model_len": 512}
    return load_model(folder, dtype, **sizes, **settings)


def logits_of(loaded):
    cache = KVCache(loaded.info.geometry, NUM_BLOCKS)
    return step_logits(
        assemble(loaded, cache.tensor, LIMITS, invariant=False), loaded.info.vocab_size
    )


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_what_its_dequantized_self_does(name, dtype, write):
    """qwen2: biases too."""
    found, expected = (load(write(name, dense=dense), dtype) for dense in (False, True))
    difference = (logits_of(found) - logits_of(expected)).norm() / logits_of(expected).norm()
    assert difference <= (1e-6 if dtype == "float32" else 1e-3)
    assert found.info.weights != expected.info.weights
    itemsize = 4 if dtype == "float32" else 2
    scales = found.weight_bytes - (expected.weight_bytes - QUANTIZED * (itemsize - 1))
    assert 0 < scales <= 4 * QUANTIZED / 32


def test_weights_are_the_numbers_of_the_files(write):
    found, expected = (
        load(write("int8-groups", dense=dense)).checkpoint for dense in (False, True)
    )
    name = "model.layers.1.mlp.down_proj"
    weight = found.linear(name).weight
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dense(torch.float32), expected.tensors[f"{name}.weight"])


def test_ignored_layers_load_with_quantized_ones(write):
    """`ignore` of compressed-tensors, within one product: queries, keys and values."""
    folder, dense = write("int8-channel"), write("int8-channel", dense=True)
    expected = logits_of(load(dense))
    tensors, own = (load_file(each / "model.safetensors") for each in (folder, dense))
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = own[name]
    del tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(load(folder)), expected, atol=1e-4, rtol=1e-4)


def group(**fields):
    found = settings(KINDS["int8-channel"])
    return {**found, "config_groups": {"a": {**found["config_groups"]["group_0"], **fields}}}


def weights(**fields):
    own = settings(KINDS["int8-groups"])["config_groups"]["group_0"]["weights"]
    return group(weights={**own, **fields})


def fp8_with(**inputs):
    """A group with FP8 weights whose activations are said to be floats, quantized in this way."""
    found = settings(KINDS["fp8-channel"])
    own = found["config_groups"]["group_0"]
    inputs = {"type": "float", **inputs}
    return {**found, "config_groups": {"a": {**own, "input_activations": inputs}}}


FP8 = settings(KINDS["fp8-blocks"])
INT8_INPUT = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is gptq"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is awq"),
        ({"quant_method": "gptq"}, "quant_method is gptq"),
        ({"bits": 4}, "quant_method is None"),
        (weights(num_bits=4), "weights have 4 bits of type int, not 8"),
        (weights(symmetric=False), "weights.symmetric is false"),
        (weights(actorder="group"), "weights.actorder is group"),
        (weights(group_size=None), "weights.group_size is None, not a number of columns above 0"),
        (weights(group_size=-1), "weights.group_size is -1, not a number"),
        (weights(group_size=32.5), "weights.group_size is 32.5, not a number"),
        (
            weights(strategy="block", block_structure=[0, 128]),
            r"block_structure is \[0, 128\], not",
        ),
        (group(targets="Linear"), "targets is Linear, not a list"),
        (group(targets=[1]), r"targets is \[1\], not a list"),
        (group(targets=["re:*up"]), r"targets has re:\*up, which is no pattern"),
        (weights(strategy="tensor_group"), "weights.strategy is tensor_group"),
        (group(format="nvfp4-pack-quantized"), "format is nvfp4-pack-quantized, not one of"),
        (group(input_activations=INT8_INPUT), "input_activations are quantized to dynamic int8"),
        (fp8_with(num_bits=8), "input_activations are quantized to static float8"),
        (fp8_with(num_bits=8, dynamic="local"), "quantized to local float8"),
        (fp8_with(num_bits=4, dynamic=True), "quantized to dynamic float4"),
        (group(output_activations=INT8_INPUT), "output_activations are quantized"),
        ({**group(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        ({**group(), "sparsity_config": {"format": "sparse-24"}}, "sparse-24, not dense"),
        ({**group(), "config_groups": {}}, "config_groups is empty"),
        ({**group(), "config_groups": ["a"]}, "cannot be read"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme is static, not dynamic"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], not \[rows"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size is 128, not"),
        ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt is ue8m0, not float"),
        ({**FP8, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
    ],
)
def test_what_the_engine_would_not_compute_is_refused_with_the_way_out(given, reason):
    with pytest.raises(ModelError, match=f"^quantization_config: .*{reason}.*engine.type: vllm"):
        read_schemes({"quantization_config": given})


def test_another_model_type_with_quantized_weights_is_refused(write):
    with pytest.raises(ModelError, match=r"olmo2 is not one of.*our own decoder alone.*vllm"):
        load(write("int8-channel", "olmo2"))


def changed(folder, name, change):
    """change: a function of the tensor; None takes it out."""
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{name}"
    tensors[name] = change(tensors.get(name))
    kept = {each: tensor for each, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        ("int8-groups", "weight_scale", lambda x: x[:, 1:].contiguous(), r"not \[128, 2\] numbers"),
        (
            *("int8-groups", "weight_scale", lambda x: x.t().contiguous()),
            r"bfloat16 \[2, 128\], not \[128, 2\]",
        ),
        (
            *("fp8-blocks", "weight_scale_inv", lambda x: x.t().contiguous()),
            r"float32 \[2, 4\], not \[4, 2\]",
        ),
        ("int8-groups", "weight_packed", lambda x: None, "up_proj.weight_packed is missing"),
        ("int8-channel", "weight_scale", lambda x: None, r"up_proj.weight is torch.int8"),
        (
            *("fp8-blocks", "weight_scale_inv", lambda x: None),
            r"up_proj.weight is torch.float8_e4m3fn.*not \[128, 64\] numbers of 16 or 32 bits",
        ),
        ("int8-channel", "weight", lambda x: x.float(), r"is torch.float32.*not torch.int8"),
        ("int8-channel", "weight_zero_point", lambda x: torch.zeros(1), "has zero points"),
        ("int8-packed", "weight_g_idx", lambda x: torch.zeros(1), "has reordered groups"),
        ("fp8-blocks", "weight_scale_inv", lambda x: x * torch.nan, "scales that are not finite"),
        (
            "fp8-blocks",
            "weight",
            lambda x: torch.full_like(x.view(torch.int8), 127).view(x.dtype),
            "codes of FP8 that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_their_config_are_refused(name, part, change, reason, write):
    folder = changed(write(name), part, change)
    with pytest.raises(ModelError, match=reason):
        logits_of(load(folder))


def without_config(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
@pytest.mark.parametrize("name", ["int8-channel", "fp8-channel"])
def test_scales_that_no_config_tells_of_are_refused(name, kind, write):
    """A config.json of the model in 16 bits beside quantized weights, or of another tool's."""
    with pytest.raises(ModelError, match=r"weight_scale is a scale.*no quantization_config.*vllm"):
        load(without_config(write(name, kind)))


def test_the_group_that_names_a_layer_most_closely_says_its_scheme():
    """As compressed-tensors chooses: a name, then a pattern, then the class; in any order."""
    own = settings(KINDS["int8-channel"])
    base = own["config_groups"]["group_0"]
    layers = ["Linear"], ["re:.*down_proj", "re:.*k_proj"], ["a.k_proj"]
    fp8 = {**base["weights"], "type": "float"}
    for order in itertools.permutations(range(3)):
        groups = {
            str(at): {
                **(base if at != 1 else {**base, "weights": fp8, "format": "float-quantized"}),
                "targets": layers[at],
            }
            for at in order
        }
        schemes = read_schemes({"quantization_config": {**own, "config_groups": groups}})
        found = [
            scheme_of(name, schemes).precision for name in ("a.down_proj", "a.k_proj", "a.q_proj")
        ]
        assert found == ["fp8_e4m3", "int8", "int8"], order


def test_a_config_says_which_layers_by_name_or_pattern(write):
    schemes = read_schemes({"quantization_config": group(targets=["re:.*mlp.*", "a.q_proj"])})
    assert [scheme_of(name, schemes) for name in ("x.mlp.up_proj", "a.q_proj", "b.q_proj")] == [
        *(schemes[0], schemes[0], None)
    ]
    folder = write("int8-channel")
    config = json.loads((folder / "config.json").read_text())
    own = config["quantization_config"]["config_groups"]["group_0"]
    own["targets"] = ["re:.*mlp.*"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj.weight is torch.int8.*not .* numbers"):
        load(folder)


@pytest.mark.parametrize(
    ("precision", "name"), [("int8", "int8-channel"), ("fp8_e4m3", "fp8-channel")]
)
def test_weights_that_are_quantized_as_they_are_loaded_are_near_their_own(
    precision, name, tiny_folder, write
):
    """They take what a checkpoint of them does, and are of the same model."""
    own = load(tiny_folder("qwen2"))
    found = load(tiny_folder("qwen2"), quantization=precision)
    assert (found.info.weights, found.info.precision) == (own.info.weights, precision)
    assert own.info.precision == "float32"
    assert found.weight_bytes == load(write(name)).weight_bytes
    difference = (logits_of(found) - logits_of(own)).norm() / logits_of(own).norm()
    assert 0 < difference < (0.06 if precision == "int8" else 0.3)


def test_head_and_embedding_are_not_quantized_as_they_are_loaded(tiny_folder):
    checkpoint = load(tiny_folder("qwen2"), quantization="int8").checkpoint
    assert isinstance(checkpoint.head.weight, torch.Tensor)
    assert isinstance(checkpoint.linear("model.layers.0.mlp.up_proj").weight, QuantizedWeight)


def test_weights_are_not_quantized_twice(write):
    with pytest.raises(ModelError, match=r"is int8, and .* in fp8_e4m3 already: leave"):
        load(write("fp8-blocks"), quantization="int8")


def test_only_our_decoder_quantizes(tiny_folder):
    with pytest.raises(ModelError, match="quantization is int8, which needs our own decoder: "):
        load(tiny_folder("olmo2"), quantization="int8")


def test_weights_that_are_not_finite_are_not_quantized(tiny_folder, write):
    folder = changed(write("int8-channel", dense=True), "weight", lambda x: x * torch.inf)
    with pytest.raises(ModelError, match="up_proj has weights that are not finite"):
        logits_of(load(folder, quantization="int8"))
