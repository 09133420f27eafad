"""Each kind of constraint takes the texts that it should, and one that cannot be compiled says
where.
"""

import json
from typing import Any

import pytest

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.compiler import FormError, literal
from pdcluster_worker.structured_output.native import complaint
from tests.worker.structured_output.schemas import of_schema, takes


def of_tag(schema: Any, *, strict: bool) -> Constraint:
    form = {"type": "json_schema", "json_schema": schema, "strict": strict}
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "regex", "pattern": "[0-9]+"},
        "end": "</f>",
    },
}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (Constraint("regex", "[a-c]{2,3}"), "abc", "ad"),
        (
            Constraint("choice", json.dumps(['say "no"', "täglich\n", "a\\b"])),
            "täglich\n",
            "say no",
        ),
        (Constraint("choice", json.dumps(['say "no"', "x"])), 'say "no"', "xx"),
        (Constraint("grammar", 'root ::= "(" root ")" | "x"'), "((x))", "((x)"),
        (Constraint("grammar", 'start: "x" | "y" start'), "yyx", "y"),
        (Constraint("structural_tag", json.dumps(TAG)), "<f>12</f>", "<f>a</f>"),
        (of_schema({"type": "integer", "minimum": 3}), "4", "2"),
        (
            of_schema({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}),
            "[1]",
            '["a"]',
        ),
        (of_schema({"type": "array"}), '[1, "a"]', "1"),
        (
            of_schema({"properties": {"a": {"type": "integer"}}, "type": "object"}),
            '{"a": 1}',
            '{"b": 1}',
        ),
        (
            of_schema(
                {
                    "properties": {"a": {}},
                    "type": "object",
                    "additionalProperties": {"type": "null"},
                }
            ),
            '{"b": null}',
            '{"b": 1}',
        ),
        (of_schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}}), "true", "1"),
        (
            of_schema({"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "boolean"}}}),
            "true",
            "1",
        ),
        (
            of_schema({"$ref": "#there", "$defs": {"x": {"$anchor": "there", "type": "boolean"}}}),
            "true",
            "1",
        ),
        (
            of_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}),
            '{"next": {"next": {}}}',
            '{"next": 1}',
        ),
        (of_schema({"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]}), "null", "1"),
        (of_schema({"type": "string", "enum": [1, "a"]}), '"a"', "1"),
        (of_schema({"type": ["integer", "null"], "enum": [1.5, 2.0, None]}), "null", "1.5"),
        (of_schema({"enum": [1, "a", "bcd"], "const": "a"}), '"a"', "1"),
        (of_schema({"enum": [1, 5, "a", "bcd"], "minimum": 3, "maxLength": 2}), '"a"', "1"),
        (of_schema({"enum": [1, 5], "exclusiveMaximum": 5, "exclusiveMinimum": 0}), "1", "5"),
        (of_schema({"type": "integer", "minimum": -3.5, "maximum": 2.5}), "-3", "-4"),
        (of_schema({"type": "integer", "minimum": -3.5, "maximum": 2.5}), "2", "3"),
        (
            of_schema(
                {
                    "type": ["integer", "null"],
                    "exclusiveMinimum": 0.5,
                    "exclusiveMaximum": 2.5,
                }
            ),
            "1",
            "0",
        ),
        (
            of_schema({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 2.5}),
            "2",
            "3",
        ),
        (of_schema({"type": "number", "minimum": -3.5}), "-3.5", "-4"),
        (
            of_schema({"type": "array", "prefixItems": [{"type": "null"}, {}], "maxItems": 1}),
            "[null]",
            "[null, 1]",
        ),
        (of_schema({"type": "array", "items": [{}, {}], "maxItems": 0}), "[]", "[1]"),
        (of_schema({"anyOf": [{"type": "array", "items": {"$ref": "#"}}]}), "[[], [[]]]", "[1]"),
        (
            of_schema(
                {
                    "type": "object",
                    "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                    "required": ["a"],
                }
            ),
            '{"a": {"a": null}}',
            "{}",
        ),
        (Constraint("grammar", 'root ::= ("a" root | ("b")){1,2} [x-z]?'), "abbz", "aa"),
        (
            of_schema({"type": "string", "maxLength": 10**9, "not": {"const": "a"}, "x-own": 1}),
            '"a"',
            "1",
        ),
        (
            of_schema(
                {
                    "type": "object",
                    "patternProperties": {"^x": {"type": "string"}},
                    "description": "d",
                }
            ),
            "{}",
            "1",
        ),
        (of_schema(True), '{"a": 1}', "a"),
    ],
)
def test_a_form_takes_its_own_texts_alone(forms, constraint, good, bad):
    assert takes(forms, constraint, good)
    assert not takes(forms, constraint, bad)


def test_white_space_between_two_parts_has_an_end(forms):
    constraint = of_schema({"type": "object", "properties": {"a": {"type": "integer"}}})

    assert takes(forms, constraint, '{\n    "a" : 1 }')
    assert not takes(forms, constraint, "{" + 200 * " ")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (
            Constraint("regex", "a(b"),
            "Regex parsing error at position 4: The parenthesis is not closed.",
        ),
        (Constraint("regex", "a(?=b)"), "at position 4: Lookahead is not supported"),
        (Constraint("grammar", 'root ::= "a" | b'), 'line 1, column 16: Rule "b" is not defined'),
        (Constraint("grammar", 'other ::= "a"'), 'The root rule with name "root" is not found'),
        (
            Constraint("structural_tag", '{"type":"structural_tag","format":{"type":"x"}}'),
            "Format type not recognized: x",
        ),
        (
            of_schema({"properties": {"a/b": {"type": "strin"}}}),
            "#/properties/a~1b/type: 'strin' is no type: use string,",
        ),
        (
            of_schema({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(a"}]}),
            "#/anyOf/1: Regex parsing error at position",
        ),
        (
            of_schema({"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}}),
            "#/properties/a: Invalid range",
        ),
        (
            of_schema({"items": {"$ref": "#/$defs/x"}}),
            "#/items/$ref: '#/$defs/x' is nowhere in the schema",
        ),
        (of_schema({"items": {"$ref": "#x"}}), "#/items/$ref: '#x' is nowhere in the schema"),
        (of_schema({"$ref": "https://example.com/x"}), "#/$ref: must point into this schema"),
        (of_schema({"properties": []}), "#/properties: must be an object whose values are schemas"),
        (of_schema({"anyOf": []}), "#/anyOf: must be a list of schemas that is not empty"),
        (of_schema({"allOf": [3]}), "#/allOf/0: must be a schema"),
        (
            of_schema({"items": {"type": "string", "enum": [1, 2]}}),
            "#/items/enum: has no value that fits what stands beside it",
        ),
        (of_schema({"type": "integer", "const": "a"}), "#/const: has no value that fits"),
        (of_schema({"const": 1, "enum": [2]}), "#/const: has no value that fits"),
        (of_schema({"minimum": "a", "type": "integer"}), "#: "),
        (
            of_schema({"type": "array", "prefixItems": [{}, {}], "minItems": 2, "maxItems": 1}),
            "#: ",
        ),
        (of_schema({"enum": []}), "#/enum: must be a list that is not empty"),
        (of_schema({"required": "a"}), "#/required: must be a list of names"),
        (of_schema({"pattern": 3}), "#/pattern: must be text"),
        (of_schema({"maxLength": -1}), "#/maxLength: must be a number that is not negative"),
        (of_schema({"minLength": 10**9}), "#/minLength: can be at most 10000 here"),
        (of_schema({"prefixItems": 10_001 * [{}]}), "#: has more than 10000 schemas in it"),
        (
            of_schema({"items": {"uniqueItems": True}}, strict=True),
            "#/items/uniqueItems: cannot be enforced",
        ),
        (
            of_schema({"allOf": [{"format": "date"}, {"format": "time"}]}, strict=True),
            "#/allOf/0/format: cannot be enforced without a type",
        ),
        (
            of_schema(
                {"items": {"$ref": "#/$defs/a", "required": ["x"]}, "$defs": {"a": {}}}, strict=True
            ),
            "#/items/required: cannot be enforced beside $ref",
        ),
        (
            of_schema({"$ref": "#/$defs/a", "allOf": 1, "$defs": {"a": {}}}, strict=True),
            "#/allOf: cannot be enforced beside",
        ),
        (
            of_schema({"type": "string", "pattern": "a*", "maxLength": 2}, strict=True),
            "#/maxLength: cannot be enforced beside pattern",
        ),
        (
            of_schema({"type": "string", "format": "uri", "pattern": "^a"}, strict=True),
            "#/format: cannot be enforced beside pattern",
        ),
        (
            of_schema({"type": "string", "pattern": "^(?!a)[a-c]$"}, strict=True),
            "#/pattern: cannot be enforced with a lookahead or lookbehind",
        ),
        (
            of_schema({"propertyNames": {"pattern": "(x)(?=a).*"}}, strict=True),
            "#/propertyNames/pattern: cannot be enforced with a lookahead",
        ),
        (
            of_schema({"type": "object", "patternProperties": {"(?<!a)b": {}}}, strict=True),
            "#/patternProperties: cannot be enforced with a lookahead",
        ),
        (
            of_tag({"type": "string", "pattern": "a(?!b).*"}, strict=True),
            "#/pattern: cannot be enforced with a lookahead",
        ),
        (
            of_schema({"type": "string", "format": "date", "minLength": 20}, strict=True),
            "#/minLength: cannot be enforced beside format",
        ),
        (
            of_schema({"anyOf": [{"minimum": 3}]}, strict=True),
            "#/anyOf/0/minimum: cannot be enforced without a type",
        ),
        (
            of_schema(
                {"type": "object", "required": ["a"], "additionalProperties": False}, strict=True
            ),
            "#/required: cannot be enforced for a name that is not",
        ),
        (
            of_tag({"items": {"uniqueItems": True}}, strict=True),
            "#/items/uniqueItems: cannot be enforced",
        ),
        (of_schema(False), "Schema 'false' cannot accept any value"),
        (of_schema({"$ref": "#"}), "#: no text at all fits it"),
        (
            of_schema({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            "#: no text at all fits it: it needs itself without end",
        ),
        (
            of_schema(
                {
                    "properties": {"a": {"$ref": "#/$defs/A"}, "next": {"$ref": "#"}},
                    "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
                }
            ),
            "#/properties/a: no text at all fits it",
        ),
        (
            of_schema(
                {
                    "type": "array",
                    "items": {"$ref": "#/$defs/node"},
                    "$defs": {
                        "node": {
                            "type": "object",
                            "properties": {
                                "n": {"type": "integer"},
                                "of": {"$ref": "#/$defs/node"},
                            },
                            "required": ["n", "of"],
                        }
                    },
                }
            ),
            "#/$defs/node/properties/of: no text at all fits it",
        ),
        (
            of_schema({"type": "array", "minItems": 1, "items": {"$ref": "#"}}),
            "#: no text at all fits it",
        ),
        (
            of_tag({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, strict=False),
            "in a schema of the structural tag: no text at all fits it: it needs itself",
        ),
        (Constraint("grammar", 'root ::= "a" root'), "no text at all fits it: it needs itself"),
        (
            Constraint("grammar", 'start: "a" x\nx: "b" x'),
            "no text at all fits it: it needs itself",
        ),
    ],
)
def test_what_cannot_be_compiled_says_where(forms, constraint, words):
    with pytest.raises((FormError, RuntimeError)) as caught:
        forms.compile(constraint)

    assert words in complaint(caught.value)


def test_a_literal_has_no_character_that_ends_it():
    assert literal('a"b\\c\nd\u2028é') == '"a\\"b\\\\c\\U0000000Ad\\U00002028é"'


def test_a_strict_schema_may_have_titles_beside_a_reference(forms):
    schema = {
        "$defs": {
            "A": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 3}},
                "required": ["n"],
            }
        },
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/A", "title": "A", "description": "one", "default": {}},
            "any": {},
        },
        "required": ["a"],
    }

    assert takes(forms, of_schema(schema, strict=True), '{"a": {"n": 3}}')
    assert not takes(forms, of_schema(schema, strict=True), '{"a": {"n": 2}}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "maxLength": 3}, '"a é"', '"a\tb"'),
        ({"type": "string", "minLength": 2}, '"abc"', '"a\x1b"'),
        ({"type": "string", "minLength": 1, "maxLength": 1}, '"a"', '""'),
        ({"type": "string", "maxLength": 300}, f'"{300 * "é"}"', '"a\tb"'),
        ({"type": "string", "maxLength": 300}, '"a"', f'"{301 * "a"}"'),
        ({"type": "string", "minLength": 200}, f'"{200 * "a"}"', f'"{200 * "a"}\t"'),
        ({"type": ["string", "null"], "maxLength": 2}, "null", '"abc"'),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, '{"ab": 1}', '{"a\t": 1}'),
        ({"type": "string", "pattern": '^a"+[b"]$'}, r'"a\"b"', '"a"b"'),
        (
            {"type": "string", "format": "uri", "pattern": "^https://a$"},
            '"https://a"',
            '"http://a"',
        ),
        ({"type": "string", "pattern": r"^C:\\\w+$"}, r'"C:\\x"', r'"C:\x"'),
        ({"type": "string", "pattern": r"^[\n]$"}, r'"\n"', '"\n"'),
        ({"type": "string", "pattern": '^["]{2}$'}, r'"\"\""', '""""'),
        ({"type": "string", "pattern": r"^[\\]$"}, r'"\\"', '"\\"'),
        ({"type": "string", "pattern": r"^[\u0000-\x1f]$"}, r'"\u001f"', '"\x1f"'),
        ({"type": "string", "pattern": r"^[^ -\uffff\u{10000}-\u{10ffff}]$"}, r'"\t"', '"\t"'),
        ({"type": "string", "pattern": r"^\cJ[\cJ]\u{a}\0$"}, r'"\n\n\n\u0000"', '"\n\n\n\0"'),
        ({"type": "string", "pattern": "^[^]$"}, '"a"', '"\n"'),
        ({"type": "string", "pattern": r"^[a\n]$"}, '"a"', '"\n"'),
        ({"type": "string", "pattern": "^(?!a)[a-c]$"}, '"b"', '"d"'),
        ({"type": "string", "pattern": r"^(\x41\n)+$"}, r'"A\nA\n"', '"A\nA\n"'),
        (
            {"type": "object", "patternProperties": {'^"$': {}}, "additionalProperties": False},
            r'{"\"": 1}',
            '{""": 1}',
        ),
    ],
)
def test_a_string_under_a_length_or_a_pattern_is_one_that_json_can_hold(forms, schema, good, bad):
    assert takes(forms, of_schema(schema), good)
    assert not takes(forms, of_schema(schema), bad)


def test_a_string_under_a_large_length_in_a_tag_is_one_that_json_can_hold(forms):
    schema = {"type": "object", "properties": {"a": {"maxLength": 300, "type": "string"}}}
    constraint = of_tag(schema, strict=False)

    assert takes(forms, constraint, '{"a": "b c"}')
    assert not takes(forms, constraint, '{"a": "b\tc"}')


@pytest.mark.parametrize(
    ("style", "text"),
    [({}, r'{"a":"\"b\""}'), ({"style": "qwen_xml"}, '<parameter=a>\n"b"\n</parameter>')],
)
def test_a_pattern_in_a_tag_is_of_the_text_as_its_style_writes_it(forms, style, text):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": '^"b"$'}},
        "required": ["a"],
    }
    tag = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": schema, **style},
    }

    assert takes(forms, Constraint("structural_tag", json.dumps(tag)), text)
