"""Fingerprints distinguish weights, whatever the file format, and ignore where a
folder came from.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdcluster_worker.errors import ModelError
from pdcluster_worker.system.fingerprint import fingerprint, weights_files
from tests.make_tiny_model import make_tiny_model


@pytest.fixture
def folder(tmp_path, tiny_folder):
    return shutil.copytree(tiny_folder("llama"), tmp_path / "model")


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_copies_have_the_same_fingerprint(folder, tiny_folder):
    assert fingerprint(folder) == fingerprint(tiny_folder("llama"))
    assert len(fingerprint(folder)) == 64


def test_other_weights_of_the_same_shape_differ(tmp_path, tiny_folder):
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    assert fingerprint(other) != fingerprint(tiny_folder("llama"))


@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_value_at_either_end_of_a_tensor_differs(folder, place):
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[place] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != before


def test_config_that_changes_the_function_differs(folder):
    before = fingerprint(folder)
    edit_config(folder, rms_norm_eps=1e-3)
    assert fingerprint(folder) != before


def test_config_that_says_where_it_came_from_does_not_differ(folder):
    before = fingerprint(folder)
    edit_config(
        folder,
        transformers_version="0",
        _name_or_path="elsewhere",
        dtype="bfloat16",
        use_cache=False,
    )
    assert fingerprint(folder) == before


def test_every_shard_counts(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for index, part in enumerate((names[:10], names[10:])):
        save_file(
            {name: tensors[name] for name in part},
            folder / f"model-0000{index + 1}-of-00002.safetensors",
        )
    before = fingerprint(folder)
    tensors[names[-1]].view(-1)[0] += 1.0
    save_file(
        {name: tensors[name] for name in names[10:]}, folder / "model-00002-of-00002.safetensors"
    )
    assert [path.name for path in weights_files(folder)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert fingerprint(folder) != before


def test_torch_files_are_read_when_there_is_no_safetensors(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    before = fingerprint(folder)
    content = bytearray((folder / "pytorch_model.bin").read_bytes())
    content[-100] ^= 1
    (folder / "pytorch_model.bin").write_bytes(content)
    assert fingerprint(folder) != before


def test_bytes_that_are_both_ends_of_a_small_tensor_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"empty": torch.zeros(0), "scalar": torch.zeros(1)}, tmp_path / "model.safetensors")
    before = fingerprint(tmp_path)
    save_file({"empty": torch.zeros(0), "scalar": torch.ones(1)}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) != before


def test_a_file_that_cannot_be_read_is_named_with_the_user(folder):
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.mkdir()  # root reads whatever the mode says, but no folder
    with pytest.raises(
        ModelError,
        match=r"cannot read .*model\.safetensors: Is a directory: make the model folder readable "
        r"for user id \d+",
    ):
        fingerprint(folder)
