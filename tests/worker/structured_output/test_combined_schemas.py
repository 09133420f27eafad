"""Keywords beside `anyOf`, `oneOf`, `allOf` or a reference hold together with it; a validator
that is not ours agrees.
"""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdcluster_worker.structured_output.lark import FormError
from tests.worker.structured_output.schemas import of_schema, takes

INT, STR, NUM, NULL, OBJ, ARR = (
    {"type": kind} for kind in ("integer", "string", "number", "null", "object", "array")
)
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
            {"allOf": [{"properties": A, "additionalProperties": False}, {"properties": B}], **OBJ},
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
        ({"type": ["string", "null"], "anyOf": [STR, INT]}, ['"a"'], ["null", "1"]),
        ({"enum": [1, "a", None], "anyOf": [NUMBER, NULL]}, ["1", "null"], ['"a"']),
        ({**OBJ, "anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {**OBJECT}}}, ['{"a":1}'], ["1"]),
        (
            {
                "$ref": "#/$defs/x",
                "required": ["a"],
                "$defs": {"x": {"type": ["object", "null"], "properties": A}},
            },
            ['{"a":1}'],
            ["{}"],
        ),
        (
            {
                **ARR,
                "prefixItems": [NUMBER],
                "allOf": [{"prefixItems": [True, STR], "items": False}],
            },
            ['[1,"a"]'],
            ['["a"]', '[1,"a",1]'],
        ),
        (
            {
                **OBJ,
                "additionalProperties": False,
                "patternProperties": {"^x": NUMBER},
                "allOf": [{"properties": {"x1": {"minimum": 3}}, "required": ["x1"]}],
            },
            ['{"x1":3}'],
            ['{"x1":2}', '{"x1":3,"y":1}'],
        ),
        ({**OBJ, "oneOf": ONE_OF_TWO}, ['{"a":1}', '{"b":""}'], ["{}", '{"a":1,"b":""}']),
        ({**OBJ, "required": ["a"]}, ['{"a":1}'], ["{}"]),
        ({**OBJ, "required": ["a"], "properties": B}, ['{"b":"","a":1}'], ['{"b":""}']),
        ({**OBJ, "properties": {"a": False, **B}}, ['{"b":""}'], ['{"a":1}']),
    ],
)
def test_keywords_next_to_a_combinator_hold_too(forms, schema, good, bad):
    validator = (
        jsonschema_rs.Draft7Validator if "$ref" in schema else jsonschema_rs.Draft202012Validator
    )
    for text in good:
        assert takes(forms, of_schema(schema), text)
        assert validator(schema).is_valid(json.loads(text))
    for text in bad:
        assert not takes(forms, of_schema(schema), text)


def test_schemas_that_refer_to_themselves_are_joined_unless_each_place_is_in_both(forms):
    schema = {
        "$defs": {
            "list": {**OBJ, "properties": {"next": {"$ref": "#/$defs/list"}}},
            "named": {"properties": {"name": STR}, "required": ["name"]},
        },
        "allOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/named"}],
    }

    assert takes(forms, of_schema(schema), '{"next":{"next":{}},"name":"a"}')
    assert not takes(forms, of_schema(schema), '{"next":{"next":{}}}')

    schema["$defs"]["named"]["properties"]["next"] = {"$ref": "#/$defs/named"}
    with pytest.raises(FormError, match="#: has more than 10000 schemas once allOf"):
        forms.compile(of_schema(schema, strict=True))
    assert takes(forms, of_schema(schema), '{"next":{"next":{}}}')  # the first of the two


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


NAMES = st.sampled_from("abc")
COMPATIBLE = [INT, NUMBER, {"enum": [2, "x"]}, {"const": 2}, True, {}]
VALUES = st.dictionaries(NAMES, st.sampled_from([1, 2, 1.5, "x", "y"]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas([*COMPATIBLE, STR, {"enum": [1, "x"]}]), VALUES)
def test_a_joined_schema_takes_nothing_that_the_sent_one_refuses(
    forms: Any, schema: Any, value: Any
):
    joined = {**OBJ, "allOf": [schema]}
    try:
        is_taken = takes(forms, of_schema(joined), json.dumps(value))
    except FormError:
        return  # nothing fits it

    assert jsonschema_rs.is_valid(joined, value) or not is_taken
