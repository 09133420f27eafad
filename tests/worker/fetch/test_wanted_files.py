"""Files that are fetched, and repositories that cannot be served."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from pdcluster_worker.errors import FetchError
from pdcluster_worker.fetch.hf_hub import (
    RemoteFile,
    adapter_files,
    gguf_file,
    small_files,
    weights_files,
)
from pdcluster_worker.fetch.model_folder import meaning


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name) for name in names]


def names(found: list[RemoteFile]) -> list[str]:
    return [file.name for file in found]


def index(*shards: str) -> bytes:
    return json.dumps(
        {"weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}}
    ).encode()


def test_config_tokenizer_and_template_are_taken_and_the_rest_is_not() -> None:
    download = [
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ),
        *(
            "vocab.json",
            "merges.txt",
            "tokenizer.model",
            "chat_template.jinja",
            "qwen.tiktoken",
            "model.safetensors.index.json",
        ),
    ]
    others = [
        "README.md",
        "model.safetensors",
        "pytorch_model.bin",
        "original/config.json",
        "modeling_own.py",
        "config.json.bak",
    ]
    assert names(small_files(files(*download, *others))) == download


def test_without_a_config_it_is_no_model() -> None:
    with pytest.raises(FetchError, match=r"GGUF files are for `pdctl up` alone: choose another"):
        small_files(files("b.gguf", "README.md", "a.gguf"))
    with pytest.raises(FetchError, match=r"no config\.json .*transformers: choose another"):
        small_files(files("README.md"))


@pytest.mark.parametrize(
    ("quantization", "chosen"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("tiny.Q8_0.gguf", "tiny.Q8_0.gguf"),
        ("tiny.q8_0.GGUF", "tiny.Q8_0.gguf"),
        ("F16", "f16.gguf"),
    ],
)
def test_a_gguf_file_is_named_by_its_quantization(quantization: str, chosen: str) -> None:
    listed = ("config.json", "tiny-Q4_K_M.gguf", "tiny.Q8_0.gguf", "f16.gguf", "mmproj-F16.gguf")
    found = gguf_file(files(*listed), quantization)

    assert found is not None
    assert found.name == chosen


def test_without_a_quantization_the_only_gguf_of_no_other_model_is_taken() -> None:
    one, both = files("README.md", "tiny.gguf"), files("config.json", "tiny.gguf")
    parts = files("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "README.md")

    assert gguf_file(one, "") == one[1]
    assert [gguf_file(each, "") for each in (both, parts)] == [None] * 2
    assert gguf_file(one, None) is None


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ("", "several GGUF files in one part (a-Q4_0.gguf, a-Q8_0.gguf, b-Q8_0.gguf): give OWNER"),
        ("Q8_0", "several GGUF files of Q8_0 in one part (a-Q8_0.gguf, b-Q8_0.gguf): give OWNER/"),
        ("8_0", "no GGUF files of 8_0 in one part (a-Q4_0.gguf, a-Q8_0.gguf, b-Q8_0.gguf): give "),
    ],
)
def test_gguf_files_to_choose_of_are_named(quantization: str, reason: str) -> None:
    with pytest.raises(FetchError, match=f"^it has {re.escape(reason)}"):
        gguf_file(files("b-Q8_0.gguf", "a-Q8_0.gguf", "a-Q4_0.gguf"), quantization)


def test_of_two_gguf_files_of_a_quantization_a_whole_name_chooses() -> None:
    both = files("tiny-UD-Q4_K_M.gguf", "tiny-Q4_K_M.gguf")
    with pytest.raises(FetchError, match=r"as in OWNER/NAME:tiny-Q4_K_M$"):
        gguf_file(both, "Q4_K_M")
    assert gguf_file(both, "tiny-Q4_K_M") == both[1]


def test_weights_are_what_the_index_names() -> None:
    listed = files(
        "model.safetensors", "consolidated.safetensors", "a-1.safetensors", "a-2.safetensors"
    )
    assert names(
        weights_files(listed, index("a-2.safetensors", "a-1.safetensors", "a-2.safetensors"))
    ) == [
        "a-1.safetensors",
        "a-2.safetensors",
    ]
    assert names(weights_files(listed, None)) == ["model.safetensors"]


def test_other_formats_are_named_when_there_are_no_safetensors() -> None:
    with pytest.raises(
        FetchError, match=r"no model\.safetensors \(weights there: pytorch_model\.bin\)"
    ):
        weights_files(files("pytorch_model.bin"), None)


@pytest.mark.parametrize("shard", ["gone.safetensors", "../../etc/passwd", "sub/a.safetensors"])
def test_a_shard_that_is_no_file_of_the_repository_is_refused(shard: str) -> None:
    with pytest.raises(FetchError, match="choose a repository or revision"):
        weights_files(files("sub/a.safetensors"), index(shard))


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": 1}'])
def test_an_index_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(FetchError, match=r"index\.json cannot be read"):
        weights_files(files("model.safetensors"), content)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space is left in /models: give the volume more space"),
        (errno.EROFS, "cannot be written: .*: let this user write there, or choose another folder"),
        (errno.EIO, "OSError"),
    ],
)
def test_what_the_file_system_refuses_is_reported(code: int, words: str) -> None:
    assert re.search(words, meaning(OSError(code, os.strerror(code)), Path("/models/tiny")))


def test_an_adapter_is_its_settings_and_its_weights() -> None:
    wanted = ["adapter_config.json", "adapter_model.safetensors"]

    assert names(adapter_files(files("README.md", "tokenizer.json", *reversed(wanted)))) == wanted
    for name in wanted:
        with pytest.raises(FetchError, match=f"no {re.escape(name)} at its root, .* choose"):
            adapter_files(files(*{*wanted} - {name}))
