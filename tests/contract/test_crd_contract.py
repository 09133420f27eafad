"""crds/pdcluster.yaml and pdcluster_operator.api say the same: fields, requirements, defaults, limits and names."""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdcluster_operator.api.accelerators import accelerators
from pdcluster_operator.api.names import MAX_WORKLOAD_NAME, REVISION_LENGTH, workload_name
from pdcluster_operator.api.pdcluster import PDClusterSpec
from pdcluster_operator.api.sections import MAX_POOLS, EngineSpec, PoolSpec

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "pdcluster.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def sections(model: type[BaseModel], schema: dict[str, Any], path: str) -> Iterator[tuple[str, type[BaseModel], dict[str, Any]]]:
    """Every model below and including one, with its schema."""
    yield path, model, schema
    for field in model.model_fields.values():
        alias = str(field.alias)
        child = schema["properties"].get(alias, {})
        child = child.get("items", child)
        for nested in models_in(field.annotation):
            yield from sections(nested, child, f"{path}.{alias}")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


SECTIONS = list(sections(PDClusterSpec, SCHEMA["properties"]["spec"], "spec"))
FIELDS = [
    (f"{path}.{field.alias}", field, schema["properties"].get(field.alias, {}))
    for path, model, schema in SECTIONS
    for field in model.model_fields.values()
]


@pytest.mark.parametrize(("path", "model", "schema"), SECTIONS, ids=[path for path, _, _ in SECTIONS])
def test_crd_has_the_fields_of_the_model(path: str, model: type[BaseModel], schema: dict[str, Any]) -> None:
    assert set(schema["properties"]) == {field.alias for field in model.model_fields.values()}
    assert set(schema.get("required", [])) == {field.alias for field in model.model_fields.values() if field.is_required()}
    assert schema["type"] == "object"


@pytest.mark.parametrize(("path", "field", "schema"), FIELDS, ids=[path for path, _, _ in FIELDS])
def test_crd_field_is_the_model_field(path: str, field: FieldInfo, schema: dict[str, Any]) -> None:
    assert schema["description"]
    if "x-kubernetes-int-or-string" not in schema:
        assert schema["type"] == json_type(field.annotation)
    if "default" in schema:
        assert schema["default"] == field.default
    if get_origin(field.annotation) is Literal:
        assert schema["enum"] == list(get_args(field.annotation))
    assert schema.get("nullable", False) is (type(None) in get_args(field.annotation) and not models_in(field.annotation))
    assert limits(schema) == model_limits(field)


def json_type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(argument for argument in get_args(annotation) if argument is not type(None))
    if hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if get_origin(annotation) is tuple:
        return "array"
    if models_in(annotation):
        return "object"
    if get_origin(annotation) is Literal:
        return "string"
    return {int: "integer", float: "number", bool: "boolean", str: "string"}[annotation]


def limits(schema: dict[str, Any]) -> dict[str, float]:
    """Numeric limits; those of int-or-string are in its integer form."""
    schema = schema.get("anyOf", [schema])[0]
    found = {key: schema[key] for key in ("maximum",) if key in schema}
    if "minimum" in schema:
        found["above" if schema.get("exclusiveMinimum") else "minimum"] = schema["minimum"]
    return found


def model_limits(field: FieldInfo) -> dict[str, float]:
    metadata = [*field.metadata, *(item for argument in get_args(field.annotation) for item in flat(argument))]
    found: dict[str, float] = {}
    for item in metadata:
        match item:
            case annotated_types.Ge(value):
                found["minimum"] = value
            case annotated_types.Gt(value):
                found["above"] = value
            case annotated_types.Le(value):
                found["maximum"] = value
    return found


def flat(annotation: Any) -> Iterator[Any]:
    for item in getattr(annotation, "__metadata__", ()):
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def test_crd_engine_descriptions_name_the_defaults() -> None:
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]["properties"]
    named = {name: schema["description"].rpartition("Default ")[2].rstrip(".") for name, schema in engine.items()}
    words = {"1Gi": 1 << 30, "true": True, "false": False, "30": 30.0}
    found = {name: words.get(text, int(text) if text.isdigit() else text) for name, text in named.items()}
    defaults = {str(field.alias): field.default for field in EngineSpec.model_fields.values() if field.default is not None}

    assert {name: found[name] for name in defaults} == defaults
    assert not any("default" in schema for schema in engine.values())


def test_crd_names_the_known_accelerators() -> None:
    pool = SCHEMA["properties"]["spec"]["properties"]["roles"]["properties"]["prefill"]["properties"]["pools"]

    assert set(pool["items"]["properties"]["gpu"]["enum"]) == set(accelerators())
    assert pool["maxItems"] == MAX_POOLS
    assert pool["items"]["properties"]["gpu"]["default"] == PoolSpec.model_fields["gpu"].default


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_crd_name_lengths_are_those_of_a_workload(role: str) -> None:
    room = MAX_WORKLOAD_NAME - len(workload_name("", role, "", "0" * REVISION_LENGTH))
    rules = [rule["rule"] for rule in SCHEMA["x-kubernetes-validations"] if f"roles.{role}." in rule["rule"]]

    assert len(rules) == 1
    assert rules[0].endswith(f"<= {room})")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_pass_the_crd_schema(path: Path) -> None:
    schema = closed(SCHEMA)
    Draft202012Validator.check_schema(schema)

    assert list(map(str, Draft202012Validator(schema).iter_errors(yaml.safe_load(path.read_text())))) == []


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """As JSON Schema of today, with unknown fields refused as the API server does in strict mode."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if "properties" in made:
        made["properties"] = {name: closed(child) for name, child in made["properties"].items()}
        made["additionalProperties"] = False
    if "items" in made:
        made["items"] = closed(made["items"])
    if made.pop("exclusiveMinimum", False):
        made["exclusiveMinimum"] = made.pop("minimum")
    return made


def test_crd_rules_carry_messages() -> None:
    def rules(schema: dict[str, Any]) -> Iterator[dict[str, str]]:
        yield from schema.get("x-kubernetes-validations", [])
        for child in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            yield from rules(child)

    assert all(rule["message"] for rule in rules(SCHEMA))
    assert len(list(rules(SCHEMA))) > 10
