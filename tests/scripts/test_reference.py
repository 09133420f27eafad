"""docs/reference.md: every field of the CRDs once, with its limits, and checked against them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = yaml.safe_load("""
type: object
description: What to serve.
required: [model]
x-kubernetes-validations: [{rule: "true", message: give a model}]
properties:
  model: {type: string, description: Its name | alias., maxLength: 9, default: tiny}
  first: &first
    type: object
    description: One.
    properties: {size: {type: integer, minimum: 1, maximum: 8}}
  second: {type: array, items: {<<: *first, description: null}}
  mode: {type: string, enum: ["On", "Off"], description: Which.}
""")


@pytest.fixture
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, reference: ModuleType) -> Path:
    (tmp_path / "crds").mkdir()
    (tmp_path / "docs").mkdir()
    for name in reference.CRDS:
        schema = {"description": "A thing.", "properties": {"spec": SPEC}}
        version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
        crd = {
            "spec": {"group": "example.io", "names": {"kind": name.upper()}, "versions": [version]}
        }
        (tmp_path / "crds" / f"{name}.yaml").write_text(yaml.safe_dump(crd, sort_keys=False))
    return tmp_path


def test_each_field_is_there_with_type_limits_and_description(
    tree: Path, reference: ModuleType
) -> None:
    text = reference.page(tree)
    assert "## PDCLUSTER\n\nA thing. `apiVersion: example.io/v1`." in text
    assert (
        "| `model` | string | default `tiny`, at most 9 characters | Its name \\| alias. Required. "
        "|" in text
    )
    assert "| `size` | integer | at least 1, at most 8 |" in text
    assert "| `mode` | string | one of `On`, `Off` | Which. |" in text
    assert "- give a model." in text


def test_a_section_like_an_earlier_one_is_named_and_not_repeated(
    tree: Path, reference: ModuleType
) -> None:
    text = reference.page(tree)
    assert text.count("### spec.first") == 2  # once in each object
    assert "### spec.second" not in text
    assert "| `second` | list of object |  | Fields: [spec.first](#specfirst). |" in text


def test_a_page_that_is_not_what_the_crds_say_is_found(
    tree: Path, reference: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(["--check"], tree) == 1
    assert "run `make charts`" in capsys.readouterr().out
    assert reference.main([], tree) == 0
    assert reference.main(["--check"], tree) == 0
    (tree / "docs" / "reference.md").write_text("another")
    assert reference.main(["--check"], tree) == 1
