"""Choice of the code that runs a model: our decoder where it computes what transformers' module
computes, else that module.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model import families
from pdcluster_worker.model.assembly import assemble
from pdcluster_worker.model.families import UnsupportedArchError
from pdcluster_worker.model.generic import PackedLinear
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.family import Family
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.ops.step_limits import StepLimits
from tests.equality import assert_same_tokens

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)


@pytest.fixture
def assembled(tiny_folder):
    def assembled(kind, dtype="float32", num_blocks=8, block_size=16):
        loaded = load_model(tiny_folder(kind), dtype, block_size=block_size, threads=1)
        return assemble(loaded, KVCache(loaded.info.geometry, num_blocks), LIMITS, invariant=False)

    return assembled


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama-mha",
        "mistral",
        "mistral-window",
        "qwen2",
        "qwen2-window",
        "qwen3",
        "smollm3",
        "gemma",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_decoder_runs_the_families_that_it_knows(kind, dtype, assembled):
    assert assembled(kind, dtype).code == "decoder"


def test_other_types_run_by_transformers_code_and_the_log_says_so(assembled, caplog):
    with caplog.at_level(logging.INFO):
        assert assembled("olmo2").code == "transformers"
    assert "model type olmo2 is not one of llama" in caplog.text


@pytest.mark.parametrize(("num_blocks", "block_size"), [(2, 1), (2, 16), (3, 4)])
def test_a_small_cache_is_enough_for_the_proof(num_blocks, block_size, assembled):
    assert assembled("llama", num_blocks=num_blocks, block_size=block_size).code == "decoder"


def test_a_short_context_is_enough_for_the_proof(tiny_folder):
    loaded = load_model(tiny_folder("llama"), "float32", block_size=16, max_model_len=5, threads=1)
    assert (
        assemble(loaded, KVCache(loaded.info.geometry, 8), LIMITS, invariant=False).code
        == "decoder"
    )


def test_products_stay_where_the_models_code_reads_its_layers(tiny_folder, monkeypatch, caplog):
    loaded = load_model(tiny_folder("olmo2"), "float32", block_size=16, threads=1)
    layer = loaded.module.model.layers[0].mlp
    computed = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: computed(x.to(layer.gate_proj.weight.dtype)))
    assemble(loaded, KVCache(loaded.info.geometry, 8), LIMITS, invariant=False)
    assert "the model's products stay as they are" in caplog.text
    assert type(layer.gate_proj) is nn.Linear


@pytest.mark.parametrize("like", [lambda x: x[:, ::2], lambda x: x.transpose(0, 1)])
def test_packed_products_take_rows_of_any_layout_and_refuse_another_dtype(like):
    linear = nn.Linear(6, 5)
    packed = PackedLinear(
        linear, Reference(torch.zeros(1, 1, 1, 2, 1, 2), AttentionShape(1, 1, 2, 1.0)), wide=False
    )
    x = like(torch.randn(6, 8, 6))
    assert torch.allclose(packed(x), linear(x), atol=1e-6)
    with pytest.raises(TypeError, match="float32 weights with"):
        packed(x.double())


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("gemma", Family()), ("smollm3", Family()), ("llama", Family(offset_norms=True))],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_that_computes_something_else_is_not_used(
    kind, wrong, dtype, tiny_folder, make_driver, reference, monkeypatch, caplog
):
    monkeypatch.setattr(families, "FAMILIES", {kind: wrong})
    driver = make_driver(tiny_folder(kind), dtype=dtype)
    assert driver.runner.forward.code == "transformers"
    assert "our decoder's logits differ from transformers' by" in caplog.text
    if dtype == "float32":
        request = driver.request("a", [5, 6, 7, 8])
        driver.finish([request], 8)
        expected, gaps = reference(tiny_folder(kind)).greedy([5, 6, 7, 8], 8)
        assert_same_tokens(gaps, expected, driver.output(request))


def layer(**parts):
    made = nn.Module()
    made.self_attn = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(made.self_attn, name, nn.Linear(2, 2))
    for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
        setattr(made, name, nn.Identity())
    for name, part in parts.items():
        setattr(made.self_attn if name.endswith("_proj") or name == "gate" else made, name, part)
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (layer(extra_norm=nn.Identity()), "parts extra_norm"),
        (layer(gate=nn.Identity()), "attention has parts gate"),
        (layer(q_proj=nn.Bilinear(2, 2, 2)), "not plain linear layers"),
    ],
)
def test_a_layer_with_parts_of_its_own_is_not_ours(made, reason):
    module = SimpleNamespace(
        config=SimpleNamespace(model_type="llama", hidden_act="silu"),
        model=SimpleNamespace(layers=[made]),
    )
    with pytest.raises(UnsupportedArchError, match=reason):
        families.read_weights(module, 8, SimpleNamespace(), [None])


def test_another_activation_is_not_ours():
    module = SimpleNamespace(config=SimpleNamespace(model_type="llama", hidden_act="relu"))
    with pytest.raises(UnsupportedArchError, match="hidden_act relu is not one of silu"):
        families.read_weights(module, 8, SimpleNamespace(), [None])


def test_the_originals_are_dropped_once_they_are_packed(tiny_folder):
    loaded = load_model(tiny_folder("olmo2"), "float32", block_size=16, threads=1)
    assemble(loaded, KVCache(loaded.info.geometry, 8), LIMITS, invariant=False)
    assert not any(type(part) is nn.Linear for part in loaded.module.modules())


def test_batch_invariance_without_kernels_is_refused(tiny_folder, monkeypatch):
    monkeypatch.setenv("PDCLUSTER_KERNELS", "off")
    loaded = load_model(tiny_folder("llama"), "float32", block_size=16, threads=1)
    with pytest.raises(ModelError, match=r"engine\.batchInvariant needs the compiled kernels"):
        assemble(loaded, KVCache(loaded.info.geometry, 8), LIMITS, invariant=True)


@pytest.mark.parametrize("kernels", ["", "off"])
def test_logits_are_float32_whatever_the_dtype(kernels, tiny_folder, make_driver, monkeypatch):
    monkeypatch.setenv("PDCLUSTER_KERNELS", kernels)
    driver = make_driver(tiny_folder("llama"), dtype="bfloat16")
    found = []
    logits = driver.runner.forward.logits
    monkeypatch.setattr(
        driver.runner.forward, "logits", lambda plan: found.append(logits(plan)) or found[-1]
    )
    driver.finish([driver.request("a", [5, 6, 7])], 1)
    assert [part.dtype for part in found] == [torch.float32]
