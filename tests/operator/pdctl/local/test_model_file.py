"""The file of a model for the machine that it is on; its text and refusals are golden."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdcluster_api.errors import StartError
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.local import model as models
from pdctl.local import model_file
from pdctl.local.gpus import DriverReport, Gpu
from pdctl.local.model import folder_of
from pdctl.local.model_file import ModelOptions, document_of, is_cluster_file
from tests.operator.pdctl.stub_model import stub_model

H200 = DriverReport((Gpu(0, "GPU-a", "NVIDIA H200"), Gpu(1, "GPU-b", "NVIDIA H200")))


@pytest.mark.parametrize(
    ("cores", "gpu", "driver", "expected"),
    [
        (1, None, H200, ["mixed"]),
        (2, None, H200, ["prefill", "decode"]),
        (1, "H200", H200, ["prefill", "decode"]),
        (8, "H100", H200, ["mixed"]),
        (8, "H200", DriverReport(reason="no nvidia-smi is on the PATH"), ["mixed"]),
    ],
)
def test_roles_without_sizes_are_by_cores_or_gpus_of_the_type(
    cores: int,
    gpu: str | None,
    driver: DriverReport,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_file, "available_cores", lambda: cores)
    monkeypatch.setattr(model_file, "read_driver", lambda: driver)

    assert list(document_of("org/tiny", ModelOptions(gpu=gpu))["spec"]["roles"]) == expected


def test_a_file_of_gpus_that_only_a_stock_engine_computes_on_names_it() -> None:
    options = ModelOptions(gpu="MI300X", mixed=1, engine="vllm")
    document = document_of("org/tiny", options)

    assert parse(document).spec.engine.type == "vllm"
    with pytest.raises(InvalidObjectError, match=r"set engine\.type: vllm"):
        parse(document_of("org/tiny", replace(options, engine=None)))


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        ("org/Qwen3-0.6B", "qwen3-0-6b"),
        ("org/7B_chat-", "b-chat"),
        ("org/405", "model"),
        ("org/" + "a" * 29 + ".b", "a" * 29),
    ],
)
def test_name_of_a_cluster_is_one_that_kubernetes_takes(repository: str, expected: str) -> None:
    document = document_of(repository, ModelOptions(mixed=1))

    assert document["metadata"]["name"] == expected
    assert document["spec"]["model"]["name"] == repository


def test_a_folder_is_served_by_its_absolute_path_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org/tiny").mkdir(parents=True)
    (tmp_path / "org/tiny/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    # a folder goes over a repository of the same name
    assert document_of("org/tiny", ModelOptions(mixed=1))["spec"]["model"] == {
        "name": "tiny",
        "path": str(tmp_path / "org/tiny"),
    }


@pytest.mark.parametrize("revision", ["v2", "0123abcd", "refs/pr/7"])
def test_a_revision_of_the_hub_follows_the_name(revision: str) -> None:
    document = document_of(f"org/tiny@{revision}", ModelOptions(mixed=1))

    assert parse(document).metadata.name == "tiny"
    assert document["spec"]["model"] == {
        "name": "org/tiny",
        "huggingFace": {"repo": "org/tiny", "revision": revision},
    }


def test_a_gguf_file_is_served_by_its_path_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    file = tmp_path / "tiny/Tiny-Q8_0.gguf"
    file.touch()

    document = document_of(str(file), ModelOptions(mixed=1))
    assert document["metadata"]["name"] == "tiny-q8-0"
    assert document["spec"]["model"] == {"name": "Tiny-Q8_0", "path": str(file)}
    # a folder may have a config.json beside it
    (tmp_path / "tiny/config.json").write_text("{}")
    document = document_of(str(tmp_path / "tiny"), ModelOptions(mixed=1))
    assert document["spec"]["model"] == {"name": "tiny", "path": str(tmp_path / "tiny")}


def test_a_gguf_file_of_the_hub_s_cache_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blob").touch()
    file = tmp_path / "Tiny-Q8_0.gguf"
    file.symlink_to("blob")
    made: list[Path] = []
    monkeypatch.setattr(models, "converted", lambda gguf, _: made.append(gguf))

    document = document_of(str(file), ModelOptions(mixed=1))
    assert document["spec"]["model"] == {"name": "Tiny-Q8_0", "path": str(file)}
    folder_of(file)
    assert made == [file]


def test_a_folder_of_several_gguf_files_is_ambiguous(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(StartError) as refused:
        document_of(str(tmp_path), ModelOptions(mixed=1))

    assert str(refused.value) == (
        f"{tmp_path}: has several GGUF files, a.gguf, b.gguf; give one of them"
    )
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert document_of(str(tmp_path), ModelOptions(mixed=1))["spec"]["model"]["path"] == str(
        tmp_path
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError) as refused:
        document_of(str(tmp_path), ModelOptions(mixed=1))

    assert str(refused.value) == (
        f"{tmp_path}: the folder has no config.json, so it holds no model; give the one that has it"
    )
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("model", ["org/missing.gguf", "models/absent", "examples/chat.yml"])
def test_a_path_without_a_file_is_no_repository(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=f"^no file at {model}; correct the path") as refused:
        document_of(model, ModelOptions(mixed=1))

    assert refused.value.exit_code == 2


@pytest.mark.parametrize("revision", ["../x", "-v", "/v", "a b", "a\x1bb", "a\n", "v1^", "x:y"])
def test_a_revision_that_the_hub_cannot_have_is_refused(revision: str) -> None:
    with pytest.raises(InvalidObjectError) as refused:
        parse(document_of(f"org/tiny@{revision}", ModelOptions(mixed=1)))

    assert str(refused.value).startswith(
        f"spec.model.huggingFace.revision: {revision!r} is not a branch, tag or commit; write one "
    )


@pytest.mark.parametrize("name", [b"m\xff", b"m\xff/deep", b"m\xff/tiny.gguf"])
@pytest.mark.parametrize(
    ("read", "option"),
    [
        (lambda path: document_of(str(path), ModelOptions(mixed=1)), ""),
        (lambda path: folder_of(path, "--model-path: "), "--model-path: "),
    ],
)
def test_a_path_that_is_not_utf_8_is_refused(
    name: bytes, read: Callable[[Path], object], option: str, tmp_path: Path
) -> None:
    path = tmp_path / os.fsdecode(name)
    if path.suffix:
        path.parent.mkdir()
        path.touch()
    else:
        stub_model(path)
    with pytest.raises(StartError) as refused:
        read(path)

    expected = f"{option}{os.fsencode(tmp_path) + b'/' + name!r}: the path is not UTF-8; rename it"
    assert (str(refused.value), refused.value.exit_code) == (expected, 2)


def test_files_and_models_differ_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "cluster").write_text("")
    (tmp_path / "tiny.gguf").write_text("")

    files = ["-", "absent.yaml", "org/absent.yml", str(tmp_path / "cluster")]
    assert [is_cluster_file(each) for each in files] == [True] * 4
    models = ["org/tiny", str(tmp_path), str(tmp_path / "tiny.gguf")]
    assert [is_cluster_file(each) for each in models] == [False] * 3
