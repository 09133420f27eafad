"""Keywords beside `anyOf`, `oneOf`, `allOf` or a reference hold together with it; a validator
that is not ours agrees.
"""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.structured_output import combining
from pdcluster_worker.structured_output.schema import SchemaError, prepare
from tests.worker.structured_output.schemas import of_schema, takes

A, B = {"a": {"type": "integer"}}, {"b": {"type": "string"}}
OBJECT = {"type": "object", "properties": {**A, **B}}
ONE_OF_TWO = [{"required": ["a"]}, {"required": ["b"]}]
NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**OBJECT, "anyOf": ONE_OF_TWO}, ['{"a":1}', '{"a":1,"b":""}'], ['"a"', "{}", '{"c":1}']),
        ({**OBJECT, "oneOf": ONE_OF_TWO}, ['{"a":1}', '{"b":""}'], ['{"a":1,"b":""}', "{}"]),
        (
            {**OBJECT, "allOf": [{"anyOf": ONE_OF_TWO}, {"required": ["b"]}]},
            ['{"b":""}', '{"a":1,"b":""}'],
            ['{"a":1}'],
        ),
        ({"allOf": [{"properties": A}, {"properties": B}]}, ['{"a":1,"b":""}', "{}"], ['{"b":1}']),
        (
            {"allOf": [{"properties": A, "required": ["a"]}], "additionalProperties": NUMBER},
            [],
            [],  # no value but a number is an integer, too
        ),
        (
            {
                "allOf": [{"properties": A, "additionalProperties": False}, {"properties": B}],
                "type": "object",
            },
            ['{"a":1}', "{}"],
            ['{"b":""}', '{"a":1,"b":""}'],
        ),
        (
            {"allOf": [{"properties": A}, {"properties": B}], "unevaluatedProperties": NUMBER},
            ['{"a":1,"b":"","c":2}'],
            ['{"c":""}'],
        ),
        (
            {"properties": {"x": {"minimum": 3}}, "allOf": [{"properties": {"x": NUMBER}}]},
            ['{"x":3}'],
            ['{"x":2}', '{"x":"3"}'],
        ),
        (
            {"type": ["string", "null"], "anyOf": [{"type": "string"}, {"type": "integer"}]},
            ['"a"'],
            ["null", "1"],
        ),
        ({"enum": [1, "a", None], "anyOf": [NUMBER, {"type": "null"}]}, ["1", "null"], ['"a"']),
        (
            {"type": "object", "anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {**OBJECT}}},
            ['{"a":1}'],
            ["1"],
        ),
        (
            {
                "$ref": "#/$defs/x",
                "required": ["a"],
                "$defs": {"x": {"type": ["object", "null"], "properties": A}},
            },
            ['{"a":1}'],
            ["{}"],
        ),
        ({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": NUMBER}}, ["1"], ['"a"']),
        (
            {
                "type": "array",
                "prefixItems": [NUMBER],
                "allOf": [{"prefixItems": [True, {"type": "string"}], "items": False}],
            },
            ['[1,"a"]'],
            ['["a"]', '[1,"a",1]'],
        ),
        (
            {
                "type": "object",
                "additionalProperties": False,
                "patternProperties": {"^x": NUMBER},
                "allOf": [{"properties": {"x1": {"minimum": 3}}, "required": ["x1"]}],
            },
            ['{"x1":3}'],
            ['{"x1":2}', '{"x1":3,"y":1}'],
        ),
        (
            {"type": "object", "oneOf": ONE_OF_TWO},
            ['{"a":1}', '{"b":""}'],
            ["{}", '{"a":1,"b":""}'],
        ),
        ({"type": "object", "required": ["a"]}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "required": ["a"], "properties": B}, ['{"b":"","a":1}'], ['{"b":""}']),
        ({"type": "object", "properties": {"a": False, **B}}, ['{"b":""}'], ['{"a":1}']),
    ],
)
def test_what_stands_beside_a_combinator_holds_too(forms, schema, good, bad):
    validator = (
        jsonschema_rs.Draft7Validator if "$ref" in schema else jsonschema_rs.Draft202012Validator
    )
    for text in good:
        assert takes(forms, of_schema(schema), text)
        assert validator(schema).is_valid(json.loads(text))
    for text in bad:
        assert not takes(forms, of_schema(schema), text)


def test_schemas_that_refer_to_themselves_are_joined_once(forms):
    schema = {
        "$defs": {
            "list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}},
            "named": {
                "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/named"}},
                "required": ["name"],
            },
        },
        "allOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/named"}],
    }

    assert takes(forms, of_schema(schema), '{"next":{"next":{"name":"c"},"name":"b"},"name":"a"}')
    assert not takes(forms, of_schema(schema), '{"next":{"next":{},"name":"b"},"name":"a"}')


def test_a_schema_that_is_joined_with_itself_within_itself_has_an_end(monkeypatch):
    itself = {"$ref": "#"}
    within = {"type": "object", "properties": {"x": itself, "y": itself}}
    schema = {
        "type": "object",
        "properties": {"x": itself},
        "allOf": [{"properties": {"x": within}}],
    }
    monkeypatch.setattr(combining, "MOST_JOINED", 200)

    prepared = prepare(schema, strict=True)

    assert len(json.dumps([prepared.schema, prepared.definitions])) < 5_000


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {
                "items": {
                    "allOf": [
                        {"pattern": "a", "type": "string"},
                        {"pattern": "b", "type": "string"},
                    ]
                }
            },
            "#/items/allOf: cannot be enforced with all that must hold beside it, as two schemas "
            "that must hold together have pattern",
        ),
        (
            {**OBJECT, "anyOf": [{**OBJECT, "minProperties": n} for n in range(101)]},
            "#/anyOf: cannot be enforced with all that must hold beside it, as the branches are",
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/x"}, {"type": "object"}],
                "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}},
            },
            "#: cannot be enforced with all that must hold beside it, as the reference leads back",
        ),
    ],
)
def test_what_cannot_be_joined_is_left_out_or_refused_with_its_place(forms, schema, words):
    with pytest.raises(SchemaError) as caught:
        prepare(schema, strict=True)

    assert words in str(caught.value)
    prepared = prepare(schema, strict=False)
    assert jsonschema_rs.is_valid(prepared.schema, ["a"] if "items" in schema else {"a": 1})


def test_a_text_gets_so_many_joined_properties_and_no_more(monkeypatch):
    schema = {
        "prefixItems": [
            {
                **OBJECT,
                "title": str(n),
                "anyOf": [{"required": ["a"], "minProperties": n}, {"required": ["b"]}],
            }
            for n in range(9)
        ]
    }
    monkeypatch.setattr(combining, "MOST_JOINED", 21)

    made = prepare(schema, strict=False).schema["prefixItems"]

    assert [len(each.get("anyOf", ())) for each in made] == 3 * [2] + 6 * [0]
    assert all(each["type"] == "object" for each in made[3:])


def schemas(types: list[Any]) -> st.SearchStrategy[Any]:
    """Schemas of objects whose properties are of these types."""
    flat = st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, st.sampled_from(types), max_size=3),
            "required": st.lists(NAMES, unique=True, max_size=2),
            "additionalProperties": st.sampled_from([True, False, NUMBER]),
            "minProperties": st.integers(0, 2),
            "type": st.just("object"),
        },
    )
    return st.recursive(
        flat,
        lambda inner: st.tuples(
            flat, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)
        ).map(lambda found: {**found[0], found[1]: found[2]}),
        max_leaves=6,
    )


def test_schemas_that_are_joined_many_times_over_stay_small():
    def nested(depth: int) -> Any:
        least = [{"properties": {"a": {"minProperties": n}}, "required": ["a"]} for n in range(3)]
        return (
            {"type": "object", "properties": {"a": nested(depth - 1)}, "anyOf": least}
            if depth
            else {"type": "object"}
        )

    assert len(json.dumps(prepare(nested(9), strict=False).schema)) < 200_000


NAMES = st.sampled_from("abc")
COMPATIBLE = [{"type": "integer"}, NUMBER, {"enum": [2, "x"]}, {"const": 2}, True, {}]
VALUES = st.dictionaries(NAMES, st.sampled_from([1, 2, 1.5, "x", "y"]))


@settings(max_examples=150, deadline=None)
@given(schemas([*COMPATIBLE, {"type": "string"}, {"enum": [1, "x"]}]), VALUES)
def test_a_joined_schema_takes_nothing_that_the_sent_one_refuses(schema: Any, value: Any):
    joined = prepare({"type": "object", "allOf": [schema]}, strict=False).schema

    if jsonschema_rs.is_valid(joined, value):
        assert jsonschema_rs.is_valid(schema, value)


@settings(max_examples=150, deadline=None)
@given(schemas(COMPATIBLE), VALUES)
def test_a_joined_open_schema_takes_all_that_the_sent_one_takes(schema: Any, value: Any):
    opened = json.loads(json.dumps(schema))
    for node in _nodes(opened):
        node.setdefault("additionalProperties", True)
    joined = prepare({"type": "object", "allOf": [opened]}, strict=False).schema

    assert jsonschema_rs.is_valid(joined, value) == jsonschema_rs.is_valid(opened, value)


def _nodes(schema: Any) -> list[dict[str, Any]]:
    branches = [*schema.get("anyOf", ()), *schema.get("allOf", ())]
    return [schema, *(node for branch in branches for node in _nodes(branch))]
