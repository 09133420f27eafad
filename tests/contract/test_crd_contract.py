"""crds/pdcluster.yaml and pdcluster_schema say the same: fields, requirements, defaults, limits
and names.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from pdcluster_schema import conditions
from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.names import MAX_WORKLOAD_NAME, REVISION_LENGTH, workload_name
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import MAX_POOLS, PoolSpec
from pdcluster_schema.values import MAX_WORKERS

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "pdcluster.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def sections(
    model: type[BaseModel], schema: dict[str, Any], path: str
) -> Iterator[tuple[str, type[BaseModel], dict[str, Any]]]:
    """Every model below and including one, with its schema."""
    yield path, model, schema
    for field in model.model_fields.values():
        alias = str(field.alias)
        child = schema["properties"].get(alias, {})
        child = child.get("items", child.get("additionalProperties", child))
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


@pytest.mark.parametrize(
    ("path", "model", "schema"), SECTIONS, ids=[path for path, _, _ in SECTIONS]
)
def test_crd_has_the_fields_of_the_model(
    path: str, model: type[BaseModel], schema: dict[str, Any]
) -> None:
    assert set(schema["properties"]) == {field.alias for field in model.model_fields.values()}
    assert set(schema.get("required", [])) == {
        field.alias for field in model.model_fields.values() if field.is_required()
    }
    assert schema["type"] == "object"


@pytest.mark.parametrize(("path", "field", "schema"), FIELDS, ids=[path for path, _, _ in FIELDS])
def test_crd_field_is_the_model_field(path: str, field: FieldInfo, schema: dict[str, Any]) -> None:
    assert schema["description"]
    if "x-kubernetes-int-or-string" not in schema:
        assert schema["type"] == json_type(field.annotation)
    if "default" in schema:
        assert schema["default"] == field.default
    # `kubectl apply` takes a null for a key to remove: both have to say the same
    if schema.get("nullable"):
        assert "default" not in schema
        assert field.default is None
    if get_origin(field.annotation) is Literal:
        assert schema["enum"] == list(get_args(field.annotation))
    assert schema.get("nullable", False) is (
        type(None) in get_args(field.annotation) and not models_in(field.annotation)
    )
    assert {
        key: value
        for key, value in limits(schema).items()
        if key in model_limits(field) or key not in LENGTHS
    } == model_limits(field)


def json_type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(
            argument for argument in get_args(annotation) if argument is not type(None)
        )
    if hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if get_origin(annotation) is tuple:
        return "array"
    if get_origin(annotation) is dict or models_in(annotation):
        return "object"
    if get_origin(annotation) is Literal:
        annotation = type(get_args(annotation)[0])
    return {int: "integer", float: "number", bool: "boolean", str: "string"}[annotation]


LENGTHS = ("maxLength", "maxItems", "maxProperties", "minItems", "minLength")
"""Fields with a bound that the model lacks: the API server needs it for the cost of a CEL rule, or
the model has a rule of its own.
"""


def limits(schema: dict[str, Any]) -> dict[str, float]:
    """Limits of numbers, and of lengths."""
    found = {key: schema[key] for key in ("maximum", *LENGTHS) if key in schema}
    if "minimum" in schema:
        found["above" if schema.get("exclusiveMinimum") else "minimum"] = schema["minimum"]
    return found


def model_limits(field: FieldInfo) -> dict[str, float]:
    """The same of a model's field; of text, list or map by the type of the field.

    Quantities are checked by a rule.
    """
    metadata = [
        *field.metadata,
        *(item for argument in get_args(field.annotation) for item in flat(argument)),
    ]
    if any(isinstance(item, BeforeValidator) for item in metadata):
        return {}
    kind = {"array": "Items", "object": "Properties"}.get(json_type(field.annotation), "Length")
    found: dict[str, float] = {}
    for item in metadata if kind == "Length" else field.metadata:
        match item:
            case annotated_types.Ge(value):
                found["minimum"] = value
            case annotated_types.Gt(value):
                found["above"] = value
            case annotated_types.Le(value):
                found["maximum"] = value
            case annotated_types.MaxLen(value):
                found[f"max{kind}"] = value
            case annotated_types.MinLen(value):
                found[f"min{kind}"] = value
    return found


def flat(annotation: Any) -> Iterator[Any]:
    for item in getattr(annotation, "__metadata__", ()):
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


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


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_crd_names_the_known_accelerators(role: str) -> None:
    pools = SCHEMA["properties"]["spec"]["properties"]["roles"]["properties"][role]["properties"][
        "pools"
    ]
    spec_rules = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    (rule,) = [rule for rule in spec_rules if rule.get("fieldPath") == f".roles.{role}.pools"]

    assert set(re.findall(r"'([^']+)'", rule["rule"])) == set(accelerators())
    for text in (rule["message"], pools["items"]["properties"]["gpu"]["description"]):
        assert all(name in text for name in accelerators())
    assert pools["maxItems"] == MAX_POOLS
    assert pools["items"]["properties"]["gpu"]["default"] == PoolSpec.model_fields["gpu"].default


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_crd_name_lengths_are_those_of_a_workload(role: str) -> None:
    room = MAX_WORKLOAD_NAME - len(workload_name("", role, "", "0" * REVISION_LENGTH))
    rules = [
        rule["rule"]
        for rule in SCHEMA["x-kubernetes-validations"]
        if f"roles.{role}." in rule["rule"]
    ]

    assert len(rules) == 1
    assert rules[0].endswith(f"<= {room})")


@pytest.mark.parametrize("field", ["blockSize", "longPrefillTokenThreshold"])
def test_crd_rules_know_the_engine_defaults(field: str) -> None:
    rules = " ".join(
        rule["rule"] for rule in SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    )
    assumed = re.findall(rf"\.\?{field}\)\.orValue\((\d+)\)", rules)
    (default,) = [each.default for each in EngineSpec.model_fields.values() if each.alias == field]

    assert assumed
    assert {int(number) for number in assumed} == {default}


@pytest.mark.parametrize(
    ("field", "on_accelerators"),
    # requests fit by default into a step of any size there
    [("maxBatchedTokens", EngineSpec().sized_for("B200").max_batched_tokens), ("maxSequences", 1)],
)
def test_crd_rules_know_the_sizes_of_both_kinds_of_devices(
    field: str, on_accelerators: int
) -> None:
    rules = " ".join(
        rule["rule"] for rule in SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    )
    assumed = re.findall(rf"\.\?{field}\)\.orValue\(role.+? == 'cpu'\) \? (\d+) : (\d+)\)", rules)
    (default,) = [each.default for each in EngineSpec.model_fields.values() if each.alias == field]

    assert len(assumed) == rules.count(f".?{field}).orValue(")
    assert {(int(cpu), int(other)) for cpu, other in assumed} == {(default, on_accelerators)}


def test_crd_knows_the_most_workers_of_an_object() -> None:
    roles = SCHEMA["properties"]["spec"]["properties"]["roles"]
    (rule,) = [rule for rule in roles["x-kubernetes-validations"] if "sum()" in rule["rule"]]
    replicas = roles["properties"]["decode"]["properties"]["pools"]["items"]["properties"][
        "replicas"
    ]

    assert rule["rule"].endswith(f" <= {MAX_WORKERS}")
    assert f" {MAX_WORKERS} " in rule["message"]
    assert f" {MAX_WORKERS}." in replicas["description"]


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


def test_crd_status_has_the_condition_types() -> None:
    conditions_schema = SCHEMA["properties"]["status"]["properties"]["conditions"]
    types = [
        value
        for name, value in vars(conditions).items()
        if name.endswith(("_READY", "READY", "SERVING", "RECONCILING", "STALLED"))
    ]
    named = [each for each in types if isinstance(each, str)]

    assert all(each in conditions_schema["description"] for each in named)
    assert len(named) == 10
    assert conditions_schema["x-kubernetes-list-map-keys"] == ["type"]


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
