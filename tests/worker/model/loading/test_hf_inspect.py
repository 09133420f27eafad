"""Answers of transformers about a model: asked once, kept, and trusted less than our decoder's own
logits.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.config.data_parallel import share_of
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.model import ModelConfig
from pdcluster_worker.config.worker import DiscoveryConfig, TLSConfig, WorkerConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model import arch_spec, model_loader
from pdcluster_worker.model.assembly import assemble
from pdcluster_worker.model.families import UnsupportedArchError
from pdcluster_worker.model.hf_inspect_process import inspect, inspect_once
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading import hf_inspect
from pdcluster_worker.model.loading.hf_inspect import (
    InspectRequest,
    drop_oldest,
    start_early,
    start_inspection,
)
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.logits_check import _logits
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.runner_loader import open_runner

LIMITS = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)
ENGINE = EngineConfig(
    block_size=16, num_blocks=8, max_batched_tokens=64, max_sequences=4, threads=1
)


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    folder = tmp_path / "answers"
    monkeypatch.setenv(hf_inspect.FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def question(tiny_folder):
    return InspectRequest(tiny_folder("llama"), "float32", None, threads=1)


@pytest.fixture
def copied(tiny_folder, tmp_path):
    """A folder of our own of a model."""
    return shutil.copytree(tiny_folder("llama"), tmp_path / "copied")


def put(question, found):
    """Keep an answer as the process that is asked does."""
    folder = hf_inspect.folder_of_answers()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{question.key()}.safetensors"
    arch_spec.write_answer(found, file)
    return file


def logits_of(loaded):
    forward = assemble(loaded, KVCache(loaded.info.geometry, 8), LIMITS, invariant=False)
    assert forward.code == "decoder"
    return _logits(forward, (40, 16), 16, loaded.info.vocab_size)


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
def test_a_model_of_an_answer_computes_the_bits_of_one_that_transformers_loaded(
    kind, dtype, tiny_folder, tmp_path
):
    question = InspectRequest(tiny_folder(kind), dtype, 512, threads=1)
    arch_spec.write_answer(inspect(question), tmp_path / "answer")
    found = arch_spec.build(arch_spec.read_answer(tmp_path / "answer"), question.path, 16)
    loaded = load_model(question.path, dtype, block_size=16, max_model_len=512, threads=1)
    assert replace(found, module=None, answer=None) == replace(loaded, module=None)
    assert found.weight_bytes == loaded.weight_bytes
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(logits_of(found), logits_of(loaded), strict=True)
    )


def test_products_of_another_dtype_stay_as_the_files_have_them_until_they_are_packed(
    tiny_folder, tmp_path
):
    question = InspectRequest(tiny_folder("llama"), "bfloat16", 512, threads=1)
    arch_spec.write_answer(inspect(question), tmp_path / "answer")
    found = arch_spec.build(arch_spec.read_answer(tmp_path / "answer"), question.path, 16)
    held = load_file(question.path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    parameters = dict(found.module.named_parameters())
    assert parameters[name].dtype == held[name].dtype == torch.float32
    assert {
        each.dtype for path, each in parameters.items() if not path.endswith("_proj.weight")
    } == {torch.bfloat16}


def test_a_question_is_another_one_for_other_weights_dtype_limit_or_versions(
    question, copied, monkeypatch
):
    weights = load_file(copied / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    others = [
        replace(question, path=copied),
        replace(question, dtype="bfloat16"),
        replace(question, max_model_len=9),
    ]
    keys = {question.key(), *(other.key() for other in others)}
    assert len(keys) == 4
    assert replace(question, threads=2).key() == question.key()
    monkeypatch.setattr(hf_inspect.importlib.metadata, "version", lambda name: "0")
    assert question.key() not in keys


def test_a_type_that_our_decoder_does_not_know_is_not_asked_about(tiny_folder):
    assert start_inspection(InspectRequest(tiny_folder("olmo2"), "float32", None)) is None


def test_an_answer_is_asked_of_a_process_once_and_then_kept(question, kept, caplog):
    caplog.set_level(logging.INFO)
    first = model_loader.open_model(question, 16)
    assert "answer=asked" in caplog.text
    assert [file.suffix for file in kept.iterdir()] == [".safetensors"]
    second = model_loader.open_model(question, 16)
    assert "answer=kept" in caplog.text
    assert first.info == second.info
    assert torch.equal(first.answer, second.answer)


def test_an_engine_with_a_kept_answer_imports_nothing_of_transformers(question):
    put(question, inspect(question))
    program = f"""
import sys
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.model import ModelConfig
from pdcluster_worker.model.runner_loader import open_runner
model = ModelConfig(name="m", path={str(question.path)!r}, dtype="float32")
runner, _, _ = open_runner(model, EngineConfig(num_blocks=8, threads=1))
assert runner.forward.code == "decoder"
heavy = ("transformers", "torch._dynamo", "torch.distributed.tensor")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert done.stdout == "[]\n"


def test_what_was_asked_early_is_used_and_another_question_asked_again(question, caplog):
    caplog.set_level(logging.INFO)
    put(question, inspect(question))
    put(replace(question, dtype="bfloat16"), inspect(replace(question, dtype="bfloat16")))
    early = start_inspection(question)
    assert model_loader.open_model(question, 16, early).info.dtype == "float32"
    assert (
        model_loader.open_model(replace(question, dtype="bfloat16"), 16, early).info.dtype
        == "bfloat16"
    )


def test_an_answer_that_does_not_fit_the_weights_is_forgotten_and_the_model_loaded_again(
    question, caplog
):
    found = inspect(question)
    file = put(
        question,
        replace(found, tensors={**found.tensors, "logits": found.tensors["logits"].flip(0)}),
    )
    runner, _, _ = open_runner(
        ModelConfig(name="m", path=str(question.path), dtype="float32"), ENGINE
    )
    assert runner.forward.code == "decoder"
    assert "transformers' kept answer does not fit the model" in caplog.text
    assert not file.exists()


def test_an_answer_is_compared_in_a_pool_that_holds_less_than_the_sequences_of_the_proof(
    question, caplog
):
    short = replace(question, max_model_len=16)
    put(short, inspect(short))
    model, engine = (
        ModelConfig(name="m", path=str(question.path), dtype="float32"),
        EngineConfig(num_blocks=2, max_model_len=16, threads=1),
    )
    runner, _, info = open_runner(model, engine)
    assert (runner.forward.code, info.max_model_len) == ("decoder", 16)
    assert "does not fit the model" not in caplog.text


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_nothing_is_asked_for_an_engine_with_ranks(ranks, question, kept):
    config = SimpleNamespace(
        model=ModelConfig(name="m", path=str(question.path), dtype="float32"),
        engine=EngineConfig(**ranks),
    )
    assert start_early(config) is None
    assert not kept.exists()


def test_what_is_asked_early_is_what_an_engine_asks_that_shares_its_worker(question):
    """Each with its share of the threads: another question would be asked again."""
    put(question, inspect(question))
    engine = EngineConfig(num_blocks=8, threads=4, data_parallel_size=2)
    model = ModelConfig(name="m", path=str(question.path), dtype="float32")
    config = WorkerConfig(
        "c", "r", "mixed", "cpu", model, DiscoveryConfig([]), TLSConfig("", "", ""), engine=engine
    )
    early = start_early(share_of(config, 1))
    assert early is not None
    assert early.question == replace(question, threads=2)


def test_a_torn_answer_is_forgotten_and_the_model_loaded_by_transformers(question, caplog):
    file = put(question, inspect(question))
    file.write_bytes(file.read_bytes()[:1000])
    assert model_loader.open_model(question, 16).answer is None
    assert "is no answer" in caplog.text
    assert not file.exists()


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo the model is wrong; exit 2", ModelError), ("exit 1", None)],
    ids=["refused", "failed"],
)
def test_a_process_that_gives_no_answer(script, expected, question, monkeypatch, caplog):
    command = ["sh", "-c", script]
    monkeypatch.setattr(
        hf_inspect,
        "_start",
        lambda *_: subprocess.Popen(command, stdout=subprocess.PIPE, text=True),
    )
    if expected is None:
        assert model_loader.open_model(question, 16).answer is None
        assert "ended with 1: the model is loaded by its code" in caplog.text
    else:
        with pytest.raises(expected, match=r"^the model is wrong$"):
            model_loader.open_model(question, 16)


def test_a_process_that_cannot_be_started_means_transformers_here(question, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no processes left")

    monkeypatch.setattr(hf_inspect, "_start", fail)
    assert model_loader.open_model(question, 16).answer is None
    assert "cannot be asked in a process of its own: no processes left" in caplog.text


def test_an_answer_that_cannot_be_kept_is_used_and_removed(question, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(hf_inspect.FOLDER_VARIABLE, str(tmp_path / "file"))
    written = []

    def start(question, file):
        arch_spec.write_answer(inspect(question), file)
        written.append(file)
        return subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(hf_inspect, "_start", start)
    assert model_loader.open_model(question, 16).answer is not None
    assert not written[0].parent.exists()


def test_the_process_that_is_asked_keeps_one_answer_and_says_why_it_refuses(
    question, kept, tiny_folder, copied, capsys
):
    kept.mkdir()
    assert inspect_once(kept / "a.safetensors", question) == 0
    before = (kept / "a.safetensors").stat()
    assert inspect_once(kept / "a.safetensors", question) == 0
    assert (kept / "a.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert inspect_once(kept / "b.safetensors", replace(question, path=copied)) == 2
    assert "its weights lack 1 tensors of config.json, model.norm.weight" in capsys.readouterr().out
    assert [file.name for file in kept.iterdir()] == ["a.safetensors"]


def renamed(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): weight for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [renamed, pickled], ids=["names", "pickle"])
def test_files_of_another_form_are_loaded_by_transformers_and_the_answer_says_so(
    change, copied, caplog
):
    change(copied)
    caplog.set_level(logging.INFO)
    question = InspectRequest(copied, "float32", None, threads=1)
    found = inspect(question)
    put(question, found)
    assert isinstance(found.form, arch_spec.NoArchSpec)
    loaded = model_loader.open_model(question, 16)
    assert loaded.answer is None
    assert "the model is loaded by transformers' code, which is slower: its" in caplog.text
    assert logits_of(loaded)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda module: setattr(module.model.norm, "variance_epsilon", 0.5),
            "norms differ in epsilon",
        ),
        (
            lambda module: setattr(
                module.model.rotary_emb,
                "forward",
                lambda like, at: (like[..., :16] + at[..., None],) * 2,
            ),
            "rotary",
        ),
        (lambda module: module.model.norm.double(), "not of one dtype"),
    ],
)
def test_a_module_that_has_no_form_is_not_described(change, reason, question):
    loaded = load_model(question.path, "float32", block_size=16, threads=1)
    change(loaded.module)
    with pytest.raises(UnsupportedArchError, match=reason):
        arch_spec.describe(loaded, question.path)


def test_rotary_embeddings_of_every_fixed_kind_are_the_same_bits(copied, tmp_path):
    config = json.loads((copied / "config.json").read_text())
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    }
    (copied / "config.json").write_text(json.dumps({**config, "rope_parameters": yarn}))
    question = InspectRequest(copied, "float32", None, threads=1)
    found = inspect(question)
    assert isinstance(found.form, arch_spec.ArchSpec)
    assert found.form.rotary_scale != 1.0


def test_only_the_newest_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_inspect, "MAX_KEPT", 2)
    for age, name in enumerate(("a", "b", "c")):
        file = tmp_path / f"{name}.safetensors"
        file.touch()
        os.utime(file, (100 + age, 100 + age))
    drop_oldest(tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["b", "c"]
