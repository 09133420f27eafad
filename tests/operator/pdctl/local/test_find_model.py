"""Source of a model for `pdctl up`: the folder that is given, the object's path, the cache by the
model's name.
"""

from pathlib import Path
from typing import Any

import pytest

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.local.model import FoundModel, find_model, with_adapters
from tests.schema.object_cases import vllm

VOLUME = {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models"}}
HUB = {"name": "tiny", "huggingFace": {"repo": "org/tiny", "revision": "v2"}}
OWN = {"name": "tiny", "path": "tiny"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a home folder of this test, still empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home/.cache/pdcluster"


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def find(
    model: dict[str, Any], document: dict[str, Any], tmp_path: Path, given: Path | None = None
) -> FoundModel:
    document["spec"]["model"] = model
    return find_model(parse(document), tmp_path / "chat.yaml", given)


@pytest.mark.parametrize("model", [OWN, VOLUME, HUB], ids=["path", "volume", "hub"])
def test_a_given_folder_goes_over_all(
    model: dict[str, Any], cache: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    model_in(cache / "tiny")
    model_in(tmp_path / "tiny")

    assert find(model, document, tmp_path, model_in(tmp_path / "given")) == FoundModel(
        tmp_path / "given", "--model-path"
    )


@pytest.mark.parametrize("path", ["tiny", "{folder}/tiny", "~/tiny"])
def test_the_objects_path_goes_over_the_cache(
    path: str, cache: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    model_in(cache / "tiny")
    expected = model_in(Path.home() / "tiny" if path.startswith("~") else tmp_path / "tiny")
    found = find({"name": "tiny", "path": path.format(folder=tmp_path)}, document, tmp_path)

    assert found == FoundModel(expected, "spec.model.path")


@pytest.mark.parametrize(
    "model",
    [VOLUME, HUB, {"name": "tiny", "path": "/models/in/an/image"}],
    ids=["volume", "hub", "path in an image"],
)
def test_the_cache_has_it_by_name(
    model: dict[str, Any], cache: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    """A folder beside the file is none of a volume's, whatever its name."""
    model_in(cache / "tiny")
    model_in(tmp_path / "tiny")

    assert find(model, document, tmp_path) == FoundModel(
        cache / "tiny", "the cache, by the name tiny"
    )


@pytest.mark.parametrize(
    ("name", "folder"), [("org/tiny", "org--tiny"), ("../../tiny", "..--..--tiny")]
)
def test_a_name_with_slashes_is_one_folder_of_the_cache(
    name: str, folder: str, cache: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    model_in(cache / folder)

    assert find({**VOLUME, "name": name}, document, tmp_path).path == cache / folder


def test_adapters_are_found_in_the_folder_of_the_file(
    document: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    vllm(args=[])(document)
    document["spec"]["model"]["adapters"] = [{"name": "sql", "path": "sql"}]

    found = with_adapters(parse(document), tmp_path / "chat.yaml")

    assert [each.path for each in found.spec.model.adapters] == [str(folder)]


@pytest.mark.parametrize("model", [OWN, VOLUME], ids=["path", "volume"])
def test_an_adapter_that_is_not_here_is_refused(
    model: dict[str, Any], document: dict[str, Any], tmp_path: Path
) -> None:
    vllm(args=[])(document)
    document["spec"]["model"] = {**model, "adapters": [{"name": "sql", "path": "sql"}]}

    with pytest.raises(InvalidObjectError) as raised:
        with_adapters(parse(document), tmp_path / "chat.yaml")

    (fault,) = raised.value.faults
    where = "volume models" if "pvc" in model else f"folder {tmp_path / 'sql'}"
    assert str(fault) == (
        f"spec.model.adapters[0].path: no adapter_config.json of sql is on this machine, in "
        f"{where}; give the adapter's folder here, and no pvc"
    )


def test_a_relative_folder_of_adapters_at_run_time_begins_at_the_file(
    document: dict[str, Any], tmp_path: Path
) -> None:
    document["spec"]["model"]["runtimeAdapters"] = {"path": "lora", "memory": "1Gi"}
    with pytest.raises(InvalidObjectError) as raised:
        with_adapters(parse(document), tmp_path / "chat.yaml")
    assert str(raised.value.faults[0]) == (
        f"spec.model.runtimeAdapters.path: is no folder of this machine: {tmp_path / 'lora'}; give "
        "a folder that is here, and no pvc"
    )

    (tmp_path / "lora").mkdir()
    found = with_adapters(parse(document), tmp_path / "chat.yaml").spec.model.runtime_adapters
    assert found is not None
    assert (found.path, found.memory) == (str(tmp_path / "lora"), 1 << 30)
