"""A model folder made of a GGUF file: the model that the file was made of, or a refusal by name;
whole or not at all.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer

from pdcluster_worker.errors import FetchError
from pdcluster_worker.fetch import gguf_file, model_folder
from pdcluster_worker.fetch.gguf_file import ARCHITECTURES, convert
from pdcluster_worker.fetch.model_folder import READY, make_once
from tests.make_gguf import make_gguf
from tests.make_tiny_model import CHAT_TEMPLATE, CORPUS, VOCAB_SIZE, make_tiny_model

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TEXT = "the quick <|im_start|>brown  fox's <7> ü"
OTHER = ": give the model's original folder or its name on the hub"
PROGRAM = (sys.executable, "-m", "pdcluster_worker.fetch.gguf_file")
FILES = [
    *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("gguf") / "tiny")


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(FetchError) as refused:
        convert(file, folder)
    return str(refused.value)


def logits(folder: Path) -> torch.Tensor:
    """In float32, of the weights in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[3, 99, 7, 250, 44, 400] * 8])).logits
    return found


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gemma"])
def test_the_folder_is_the_model_that_the_file_was_made_of(
    architecture: str, tmp_path: Path
) -> None:
    original = make_tiny_model(architecture, tmp_path / "tiny")
    made = tmp_path / "made"
    made.mkdir()
    convert(make_gguf(original, tmp_path / "tiny.gguf"), made)

    assert sorted(path.name for path in made.iterdir()) == FILES
    assert torch.equal(logits(made), logits(original))
    before, after = (AutoTokenizer.from_pretrained(each) for each in (original, made))
    assert after(TEXT).input_ids == before(TEXT).input_ids
    assert after.chat_template == before.chat_template


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gguf_file, "LOG_SECONDS", 0.0)
    caplog.set_level("INFO", "pdcluster_worker.fetch.gguf_file")

    convert(make_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path)

    lines = [each for each in caplog.messages if each.startswith("converting tensors=")]
    number = len(gguf.GGUFReader(tmp_path / "tiny.gguf").tensors)
    assert lines == [f"converting tensors={each} of={number}" for each in range(number)]


def test_a_gemma_has_its_weights_and_its_vocabulary_of_sentencepiece(tmp_path: Path) -> None:
    """Such a file has no merges, and two tokens that end an answer."""
    original = make_tiny_model("gemma", tmp_path / "tiny")
    before = sentencepiece_tokenizer()
    before.save_pretrained(original)
    file = make_gguf(original, tmp_path / "tiny.gguf", end_of_turn=6)
    made = tmp_path / "made"
    made.mkdir()
    convert(file, made)

    assert torch.equal(logits(made), logits(original))
    after = AutoTokenizer.from_pretrained(made)
    assert after("fox").input_ids != [3]
    for text in ("the quick   brown  fox's ü", " jumps\n\nover 7", "<start_of_turn>user\nthe"):
        assert after(text, add_special_tokens=False).input_ids == (
            before(text, add_special_tokens=False).input_ids
        )
        assert after.decode(after(text, add_special_tokens=False).input_ids) == text
    settings = json.loads((made / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 6]


def sentencepiece_tokenizer() -> GemmaTokenizer:
    """As Gemma's: merged pieces in the order of their merges, then the characters."""
    learning = Tokenizer(models.BPE())
    learning.normalizer = normalizers.Replace(" ", "▁")
    learning.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    learned = json.loads(learning.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *map("".join, merges)]
    tokens += [token for token in learned["vocab"] if len(token) == 1]
    tokens += [f"<unused{number}>" for number in range(VOCAB_SIZE - len(tokens))]
    made = GemmaTokenizer({token: number for number, token in enumerate(tokens)}, merges)
    made.add_special_tokens({"additional_special_tokens": list(special[5:])})
    made.chat_template = CHAT_TEMPLATE
    return made


def test_quantized_tensors_are_near_what_they_were(tiny: Path, tmp_path: Path) -> None:
    file = make_gguf(tiny, tmp_path / "tiny.gguf", Q8_0)
    made = tmp_path / "made"
    made.mkdir()
    convert(file, made)

    expected, found = logits(tiny), logits(made)
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"architecture": "deepseek2"},
            "its architecture is deepseek2, not one of llama, qwen2, qwen3, gemma",
        ),
        (
            {"architecture": "gemma2"},
            "its architecture is gemma2, which only `engine.type: vllm` serves (its attention "
            "logits are capped)",
        ),
        (
            {"architecture": "gemma3"},
            "its architecture is gemma3, which leaves out the layers with a window, their rotary "
            "base and the scale of queries",
        ),
        (
            {"fields": {"rope.scaling.factor": 4.0}},
            "its field llama.rope.scaling.factor would be lost",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
            "the scaling of its rotary embedding (rope_freqs.weight) would be lost",
        ),
        (
            {"tensors": {"extra.weight": np.ones((2, 2), np.int8)}},
            "the type I8 of its tensor extra.weight is not known",
        ),
    ],
    ids=["architecture", "gemma2", "gemma3", "field", "rope", "type"],
)
def test_what_would_be_read_wrongly_is_refused_by_name(
    options: dict[str, Any], reason: str, tiny: Path, tmp_path: Path
) -> None:
    file = make_gguf(tiny, tmp_path / "tiny.gguf", **options)

    assert refusal(file, tmp_path) == f"tiny.gguf is not converted: {reason}{OTHER}"


def test_a_tensor_that_the_model_has_and_the_file_has_not_is_named(
    tiny: Path, tmp_path: Path
) -> None:
    """transformers would draw it at random, with a warning."""
    deeper = shutil.copytree(tiny, tmp_path / "deeper")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    text = refusal(make_gguf(deeper, tmp_path / "tiny.gguf"), tmp_path)

    assert text == (
        "tiny.gguf is not converted: its tensors are not those of the model (of 9 "
        f"model.layers.2.input_layernorm.weight){OTHER}"
    )


def test_a_model_that_is_taken_for_another_by_its_name_is_refused(
    tiny: Path, tmp_path: Path
) -> None:
    file = make_gguf(shutil.copytree(tiny, tmp_path / "mistral"), tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()

    assert refusal(file, tmp_path / "made") == (
        "tiny.gguf is not converted: transformers takes it for mistral, with other settings: give "
        "the model's original folder or its name on the hub"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is no GGUF file"),
        (b"no model at all", "is no GGUF file"),
        (b"GGUFxx", "is cut off"),
        (None, "is cut off"),
    ],
    ids=["empty", "other", "begin", "half"],
)
def test_a_broken_file_is_named(
    content: bytes | None, reason: str, tiny: Path, tmp_path: Path
) -> None:
    file = make_gguf(tiny, tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    text = refusal(file, tmp_path)

    assert text == (
        f"{file} {reason}: get the file again, or give the model's original folder or its name on "
        "the hub"
    )


def test_a_version_of_the_format_that_is_not_known_is_named(tiny: Path, tmp_path: Path) -> None:
    file = make_gguf(tiny, tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + (9).to_bytes(4, "little") + whole[8:])

    reason = "it is of version 9 of the format, and 2 and 3 are known"
    assert refusal(file, tmp_path) == f"tiny.gguf is not converted: {reason}{OTHER}"


def test_a_type_of_a_tensor_that_no_reader_knows_is_named(tiny: Path, tmp_path: Path) -> None:
    """A newer format than the reader has one."""
    name = b"extra.weight"
    file = make_gguf(
        tiny, tmp_path / "tiny.gguf", tensors={name.decode(): np.ones((2, 2), np.int8)}
    )
    whole = bytearray(file.read_bytes())
    place = whole.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, and each
    assert int.from_bytes(whole[place : place + 4], "little") == gguf.GGMLQuantizationType.I8
    whole[place : place + 4] = (199).to_bytes(4, "little")
    file.write_bytes(whole)

    reason = "the type 199 of one of its tensors is not known"
    assert refusal(file, tmp_path) == f"tiny.gguf is not converted: {reason}{OTHER}"


def test_one_part_of_a_model_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00003.gguf"
    part.touch()

    assert refusal(part, tmp_path) == (
        "big-00001-of-00003.gguf is one part of a model: join its parts (llama-gguf-split "
        "--merge), or give the model's original folder or its name on the hub"
    )


def test_too_little_space_is_reported_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, target = make_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path / "made"
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(model_folder.shutil, "disk_usage", lambda _: usage)

    with pytest.raises(FetchError, match=r"has 0\.0 MB free and 0\.[1-9] MB are still missing"):
        make_once(target, lambda folder: convert(file, folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.lock", "tiny.gguf"]


def test_a_disk_that_fills_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says so by an error of its own."""
    file, target = make_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path / "made"
    full = RuntimeError("I/O error: No space left on device (os error 28)")

    def fill(_model: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise full

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fill)
    with pytest.raises(FetchError, match=f"no space is left in {tmp_path}: give the volume more"):
        make_once(target, lambda folder: convert(file, folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.lock", "tiny.gguf"]


def test_a_place_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = (*PROGRAM, str(make_gguf(tiny, tmp_path / "tiny.gguf")), str(tmp_path / "file/made"))
    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert found.returncode == 2
    assert found.stderr.startswith(f"error: {tmp_path / 'file'}")
    assert found.stderr.count("\n") == 1


def test_a_folder_made_of_another_file_is_refused(tmp_path: Path) -> None:
    file, target = tmp_path / "a.gguf", tmp_path / "made"
    other, made = tmp_path / "b.gguf", list[Path]()
    file.write_bytes(b"a")
    other.write_bytes(b"bb")
    make_once(target, made.append, file)
    make_once(target, made.append, file)

    with pytest.raises(FetchError) as refused:
        make_once(target, made.append, other)
    assert str(refused.value).startswith(f"{target} holds a model made of a.gguf (1 bytes, ")
    assert ", not b.gguf (2 bytes, " in str(refused.value)
    assert str(refused.value).endswith("choose a folder of its own for each file, or remove it")
    os.utime(file, ns=(1, 1))
    with pytest.raises(FetchError, match=r"not a\.gguf \(1 bytes, changed at 1 ns"):
        make_once(target, made.append, file)
    (target / READY).write_text("")
    with pytest.raises(FetchError, match=r"an unknown file, not a\.gguf"):
        make_once(target, made.append, file)
    assert len(made) == 1


def test_a_file_that_is_missing_is_an_error_though_the_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / READY).touch()
    file = tmp_path / "no.gguf"
    command = (*PROGRAM, str(file), str(tmp_path / "made"))
    found = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stderr) == (2, f"error: {file} is no file: correct the path\n")


@pytest.mark.processes
def test_two_at_once_make_it_once_and_a_killed_one_leaves_no_half(
    tiny: Path, tmp_path: Path
) -> None:
    file, target = make_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path / "made"
    command = (*PROGRAM, str(file), str(target))
    work = tmp_path / ".made.partial"

    killed = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not work.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert work.exists()
    assert not target.exists()

    both = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    shown = b"".join(process.communicate(timeout=120)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert shown.count(b"converting tiny.gguf, once") == 1
    assert sorted(path.name for path in target.iterdir()) == [READY, *FILES]
    assert not work.exists()
    made = target.stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, check=False)
    assert (again.returncode, again.stderr) == (0, b"")
    assert target.stat().st_mtime_ns == made
