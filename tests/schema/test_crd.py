"""The CRDs that are made from the types."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict

import pytest
import yaml
from pydantic import Field

from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.crd.definitions import pdcluster_crd
from pdcluster_schema.crd.openapi import SchemaMaker
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.section import Cel, Crd, Many, SpecSection, spelled
from pdcluster_schema.values import MAX_WORKERS

ROOT = Path(__file__).parents[2]
SCHEMA = pdcluster_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


class Part(SpecSection):
    """One part."""

    size: Annotated[int, Field(ge=1, le=9)] = 2


class Example(SpecSection):
    """An example."""

    name: Annotated[str, Field(max_length=9), spelled("[a-z]+", "a word", "use letters")]
    """Its name, in
    one word.
    """
    share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    kind: Literal["a", "b"] = "a"
    parts: Annotated[tuple[Part, ...], Many, Field(max_length=3)] | None = None
    named: Annotated[dict[str, Part], Crd(maxProperties=2)] = Field(default_factory=dict)
    amount: Annotated[int | str, Crd(maxLength=4)] = 1
    only: Part | None = None
    engine: EngineSpec = EngineSpec()

    RULES = (Cel("self.name !=\n  'x'", "not x", ".name"),)


class ExampleStatus(TypedDict, total=False):
    """Its status."""

    at: Required[Annotated[str, Crd(format="date-time")]]
    """Time of it."""
    sizes: Annotated[list[int], Crd(list_type="atomic")]


PART = {
    "type": "object",
    "description": "One part.",
    "properties": {
        "size": {"type": "integer", "format": "int64", "minimum": 1, "maximum": 9, "default": 2}
    },
}


def test_a_section_is_a_structural_schema() -> None:
    made = SchemaMaker().section(Example)
    fields = made["properties"]

    assert made | {"properties": {}} == {
        "type": "object",
        "description": "An example.",
        "required": ["name"],
        "x-kubernetes-validations": [
            {"rule": "self.name != 'x'", "message": "not x", "fieldPath": ".name"}
        ],
        "properties": {},
    }
    assert fields["name"] == {
        "type": "string",
        "maxLength": 9,
        "description": "Its name, in one word.",
        "x-kubernetes-validations": [
            {"rule": "self.matches('^[a-z]+$')", "message": "not a word: use letters"}
        ],
    }
    assert fields["share"] == {
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 1,
        "nullable": True,
    }
    assert fields["kind"] == {"type": "string", "enum": ["a", "b"], "default": "a"}
    # a section that is left out is not null
    assert fields["parts"] == {"type": "array", "items": PART, "maxItems": 3}
    assert fields["only"] == PART
    assert fields["named"] == {
        "type": "object",
        "additionalProperties": PART,
        "maxProperties": 2,
    }
    assert fields["amount"] == {"x-kubernetes-int-or-string": True, "maxLength": 4, "default": 1}
    assert not any("default" in each for each in fields["engine"]["properties"].values())


def test_a_status_is_a_structural_schema() -> None:
    assert SchemaMaker().section(ExampleStatus) == {
        "type": "object",
        "description": "Its status.",
        "required": ["at"],
        "properties": {
            "at": {"type": "string", "format": "date-time", "description": "Time of it."},
            "sizes": {
                "type": "array",
                "items": {"type": "integer", "format": "int64"},
                "x-kubernetes-list-type": "atomic",
            },
        },
    }


@pytest.mark.parametrize("kind", ["pdcluster", "pdpoolscaler"])
def test_the_files_are_yaml_that_says_no_more_than_the_types(kind: str) -> None:
    written = yaml.safe_load((ROOT / "crds" / f"{kind}.yaml").read_text())

    assert written["kind"] == "CustomResourceDefinition"
    assert written["metadata"]["name"] == f"{kind}s.pdcluster.io"
    if kind == "pdcluster":
        assert written == pdcluster_crd()


def test_crd_engine_descriptions_name_the_defaults() -> None:
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]
    named = {
        name: schema["description"].rpartition("Default ")[2].rstrip(".").partition(";")[0]
        for name, schema in engine.items()
    }
    words = {"1Gi": 1 << 30, "true": True, "false": False, "30": 30.0}
    found = {
        name: words.get(text, int(text) if text.isdigit() else text) for name, text in named.items()
    }
    defaults = {
        str(field.alias): field.default
        for field in EngineSpec.model_fields.values()
        if field.default is not None
    }

    assert {name: found[name] for name in defaults} == defaults
    assert not any("default" in schema for schema in engine.values())


def test_crd_engine_descriptions_name_the_sizes_on_an_accelerator() -> None:
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]
    sized = EngineSpec().sized_for("B200").model_dump(by_alias=True)

    for field in ("maxBatchedTokens", "maxSequences", "deviceMemoryShare"):
        assert re.search(rf"\b{sized[field]}\b.* on an accelerator", engine[field]["description"])


def test_descriptions_name_the_known_accelerators() -> None:
    roles = SCHEMA["properties"]["spec"]["properties"]["roles"]["properties"]
    pool = roles["decode"]["properties"]["pools"]["items"]["properties"]

    assert all(name in pool["gpu"]["description"] for name in accelerators())
    assert f" {MAX_WORKERS}." in pool["replicas"]["description"]


def test_crd_never_fills_in_what_counts_as_given() -> None:
    """Defaults of `replicas`, and any inside `engine` or a pod template, would speak
    for the user.
    """
    assert [
        path
        for path, schema in all_below(SCHEMA)
        if "default" in schema and re.search(r"replicas$|engine|podTemplate", path)
    ] == []


def test_crd_has_words_for_every_field() -> None:
    plain = {"", ".apiVersion", ".kind", ".metadata", ".metadata.name"}
    assert [
        path
        for path, schema in all_below(SCHEMA)
        if not schema.get("description") and path not in plain
    ] == []


def all_below(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field below a schema with its own, entries of lists and maps aside."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from all_below(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from (each for each in all_below(schema[key], path) if each[0] != path)


def test_crd_rules_carry_messages() -> None:
    rules = [
        rule
        for _, schema in all_below(SCHEMA)
        for rule in schema.get("x-kubernetes-validations", [])
    ]

    assert all(rule["message"] for rule in rules)
    assert len(rules) > 10


def numbers(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number below a schema, with its path."""
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from numbers(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(child := schema.get(name), dict):
            yield from numbers(child, f"{path}[]")


@pytest.mark.parametrize(("path", "schema"), list(numbers(SCHEMA["properties"]["spec"], "spec")))
def test_every_number_of_a_spec_has_a_greatest_value(path: str, schema: dict[str, Any]) -> None:
    assert "maximum" in schema or "enum" in schema, f"{path}: give it a maximum"
