"""Choice of the code that runs a model: our decoder where it computes what transformers' module
computes, else that module.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder_loader import open_decoder
from pdcluster_worker.model.generic import PackedLinear
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.runner_loader import assemble
from pdcluster_worker.model.step_plan import StepLimits

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)


@pytest.fixture
def assembled(tiny_folder):
    def assembled(kind):
        loaded = load_model(tiny_folder(kind), "float32", block_size=16, threads=1)
        return assemble(loaded, KVCache(loaded.info.geometry, 8).tensor, LIMITS, invariant=False)

    return assembled


def test_other_types_run_by_transformers_code_and_the_log_says_so(assembled, caplog):
    with caplog.at_level(logging.INFO):
        assert assembled("olmo2").code == "transformers"
    assert (
        "transformers' code, which is slower: model type olmo2 is not one of llama" in caplog.text
    )


def test_products_stay_where_the_models_code_reads_its_layers(tiny_folder, monkeypatch, caplog):
    loaded = load_model(tiny_folder("olmo2"), "float32", block_size=16, threads=1)
    layer = loaded.module.model.layers[0].mlp
    computed = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: computed(x.to(layer.gate_proj.weight.dtype)))
    assemble(loaded, KVCache(loaded.info.geometry, 8).tensor, LIMITS, invariant=False)
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


def test_the_originals_are_dropped_once_they_are_packed(tiny_folder):
    loaded = load_model(tiny_folder("olmo2"), "float32", block_size=16, threads=1)
    assemble(loaded, KVCache(loaded.info.geometry, 8).tensor, LIMITS, invariant=False)
    assert not any(type(part) is nn.Linear for part in loaded.module.modules())


def test_batch_invariance_without_kernels_is_refused(tiny_folder, monkeypatch):
    monkeypatch.setenv("PDCLUSTER_KERNELS", "off")
    loaded = load_model(tiny_folder("llama"), "float32", block_size=16, threads=1)
    with pytest.raises(ModelError, match=r"engine\.batchInvariant needs the compiled kernels"):
        assemble(loaded, KVCache(loaded.info.geometry, 8).tensor, LIMITS, invariant=True)


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


def test_experts_are_refused_on_a_gpu(tiny_folder):
    loaded = load_model(tiny_folder("mixtral"), "float32", block_size=16, threads=1)
    assert loaded.expert_bytes(64) == 16 * loaded.expert_bytes(4) > 0
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(
        ModelError, match=r"experts are computed on CPUs .*: set engine.device: cpu"
    ):
        open_decoder(loaded.checkpoint, on_gpu, LIMITS, invariant=False)
