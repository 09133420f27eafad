"""Each kind of constraint takes the texts that it should, and one that cannot be compiled says
where.
"""

import json
from functools import partial
from typing import Any

import pytest

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.lark import FormError
from tests.worker.structured_output.schemas import of_schema as of
from tests.worker.structured_output.schemas import takes


def of_tag(schema: Any, *, strict: bool) -> Constraint:
    return of_format({"type": "json_schema", "json_schema": schema, "strict": strict})


def of_format(form: Any) -> Constraint:
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


strict = partial(of, strict=True)


INT, STR, NUM, NULL, BOOL, OBJ, ARR = (
    {"type": kind} for kind in ("integer", "string", "number", "null", "boolean", "object", "array")
)
ODD = {"type": "string", "pattern": "(a"}
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
        (of({**INT, "minimum": 3}), "4", "2"),
        (of({**ARR, "items": [INT], "additionalItems": False}), "[1]", '["a"]'),
        (of(ARR), '[1, "a"]', "1"),
        (of({"properties": {"a": INT}, **OBJ}), '{"a": 1}', '{"b": 1}'),
        (
            of({"properties": {"a": {}}, **OBJ, "additionalProperties": NULL}),
            '{"b": null}',
            '{"b": 1}',
        ),
        (of({"$ref": "#/$defs/a~1b", "$defs": {"a/b": BOOL}}), "true", "1"),
        (of({"$ref": "#/definitions/a%20b", "definitions": {"a b": BOOL}}), "true", "1"),
        (of({"$ref": "#there", "$defs": {"x": {"$anchor": "there", **BOOL}}}), "true", "1"),
        (
            of({**OBJ, "properties": {"next": {"$ref": "#"}}}),
            '{"next": {"next": {}}}',
            '{"next": 1}',
        ),
        (of({"anyOf": [{"$ref": "#/anyOf/1"}, NULL]}), "null", "1"),
        (of({**STR, "enum": [1, "a"]}), '"a"', "1"),
        (of({"type": ["integer", "null"], "enum": [1.5, 2.0, None]}), "null", "1.5"),
        (of({"enum": [1, "a", "bcd"], "const": "a"}), '"a"', "1"),
        (of({"enum": [1, 5, "a", "bcd"], "minimum": 3, "maxLength": 2}), '"a"', "1"),
        (of({"enum": [1, 5], "exclusiveMaximum": 5, "exclusiveMinimum": 0}), "1", "5"),
        (of({**INT, "minimum": -3.5, "maximum": 2.5}), "-3", "-4"),
        (of({**INT, "minimum": -3.5, "maximum": 2.5}), "2", "3"),
        (
            of({"type": ["integer", "null"], "exclusiveMinimum": 0.5, "exclusiveMaximum": 2.5}),
            "1",
            "0",
        ),
        (of({**INT, "exclusiveMinimum": 0.5, "exclusiveMaximum": 2.5}), "2", "3"),
        (of({**NUM, "minimum": -3.5}), "-3.5", "-4"),
        (of({**ARR, "prefixItems": [NULL, {}], "maxItems": 1}), "[null]", "[null, 1]"),
        (of({**ARR, "items": [{}, {}], "maxItems": 0}), "[]", "[1]"),
        (of({"anyOf": [{**ARR, "items": {"$ref": "#"}}]}), "[[], [[]]]", "[1]"),
        (
            of({**OBJ, "properties": {"a": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["a"]}),
            '{"a": {"a": null}}',
            "{}",
        ),
        (Constraint("grammar", 'root ::= ("a" root | ("b")){1,2} [x-z]?'), "abbz", "aa"),
        (of({**STR, "maxLength": 10**9, "not": {"const": "a"}, "x-own": 1}), '"a"', "1"),
        (of({**OBJ, "patternProperties": {"^x": STR}, "description": "d"}), "{}", "1"),
        (of(True), '{"a": 1}', "a"),
        (of({**STR, "pattern": "^(?:[a-z]+ )*[a-z]+$", "minLength": 100}), '"a b"', '"a  b"'),
        (
            of(
                {
                    **OBJ,
                    "properties": {
                        "pattern": {**STR, "format": "uri", "minLength": 100},
                        "minLength": INT,
                    },
                }
            ),
            '{"pattern": "https://a", "minLength": 1}',
            '{"pattern": "a"}',
        ),
    ],
)
def test_a_form_takes_its_own_texts_alone(forms, constraint, good, bad):
    assert takes(forms, constraint, good)
    assert not takes(forms, constraint, bad)


def test_white_space_between_two_parts_has_an_end(forms):
    constraint = of({**OBJ, "properties": {"a": INT}})

    assert takes(forms, constraint, '{\n    "a" : 1 }')
    assert not takes(forms, constraint, "{" + 200 * " ")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "a(b"), "regular expression, position 2: unclosed group"),
        (Constraint("regex", "a(?=b)"), "position 2: look-around, including look-ahead"),
        (Constraint("grammar", 'root ::= "a" | b'), "line 1, column 16: the rule b is not defined"),
        (Constraint("grammar", 'other ::= "a"'), "has no rule root"),
        (
            Constraint("structural_tag", '{"type":"structural_tag","format":{"type":"x"}}'),
            "Format type not recognized: x",
        ),
        (
            of({"properties": {"a/b": {"type": "strin"}}}),
            "#/properties/a~1b/type: 'strin' is no type: use string,",
        ),
        (
            of({"anyOf": [NULL, {**STR, "pattern": "(a"}]}),
            "#/anyOf/1: regular expression, position 1: unclosed group",
        ),
        (
            of({"items": {"$ref": "#/$defs/x"}}),
            "#/items/$ref: '#/$defs/x' is nowhere in the schema",
        ),
        (of({"items": {"$ref": "#x"}}), "#/items/$ref: '#x' is nowhere in the schema"),
        (of({"$ref": "https://example.com/x"}), "#/$ref: must point into this schema"),
        (of({"properties": []}), "#/properties: must be an object whose values are schemas"),
        (of({"anyOf": []}), "#/anyOf: must be a list of schemas that is not empty"),
        (of({"allOf": [3]}), "#/allOf/0: must be a schema"),
        (of({**INT, "const": "a"}), "#: no value fits it"),
        (of({"const": 1, "enum": [2]}), "#: no value fits it"),
        (of({"minimum": "a", **INT}), "#: "),
        (of({**ARR, "prefixItems": [{}, {}], "minItems": 2, "maxItems": 1}), "#: "),
        (
            of({**ARR, "items": {**STR, "const": 1}, "minItems": 1}),
            "#/items: no value fits it: incompatible types",
        ),
        (of({"enum": []}), "#/enum: must be a list that is not empty"),
        (of({"required": "a"}), "#/required: must be a list of names"),
        (of({"pattern": 3}), "#/pattern: must be text"),
        (of({"maxLength": -1}), "#/maxLength: must be a number that is not negative"),
        (of({"minLength": 10**9}), "#/minLength: can be at most 10000 here"),
        (of({"prefixItems": 10_001 * [{}]}), "#: has more than 10000 schemas once"),
        (strict({"items": {"uniqueItems": True}}), "#/items/uniqueItems: cannot be enforced"),
        (strict({**STR, "pattern": "^(?!a)[a-c]$"}), "#/pattern: has a lookahead or lookbehind"),
        (
            strict({**OBJ, "patternProperties": {"(?<!a)b": {}}}),
            "#/patternProperties: has a lookahead or lookbehind",
        ),
        (
            of_tag({**STR, "pattern": "a(?!b).*"}, strict=True),
            "#/pattern: has a lookahead or lookbehind",
        ),
        (strict({**STR, "format": "date", "minLength": 20}), "#: no value fits it: Regex is empty"),
        (
            of_tag({"items": {"uniqueItems": True}}, strict=True),
            "#/items/uniqueItems: cannot be enforced",
        ),
        (of(False), "#: is false, which no value fits"),
        (of({"$ref": "#"}), "#: no value fits it: no answer can have this form"),
        (Constraint("grammar", "root ::= root"), "no answer can have this form"),
        (Constraint("regex", r"[^\s\S]"), "no answer can have this form"),
        (strict({"propertyNames": {"not": {}}}), "#/propertyNames: cannot be enforced"),
        (strict({**STR, "format": "iri"}), "#/format: is not enforced: use one of date-time,"),
        (
            strict({"allOf": [{"pattern": str(n)} for n in range(4)], **STR}),
            "#: joins more than 3 patterns or formats for one string",
        ),
        (
            strict(
                {"allOf": [{"$ref": "#/$defs/x"}, OBJ]}
                | {"$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}}
            ),
            "#: has more than 10000 schemas once allOf, anyOf, oneOf and $ref are joined",
        ),
        (
            strict({"items": {**INT, "multipleOf": 10**6}}),
            "#/items/multipleOf: must be a number up to 1000, of at most 20",
        ),
        (
            strict({"anyOf": [{**INT, "multipleOf": n} for n in (999, 998)]}),
            "#/anyOf/0/multipleOf: must be a number up to 1000",
        ),
        (
            strict({"patternProperties": {f"^a{n}b": {} for n in range(31)}}),
            "#: has more than 30 patternProperties of one object",
        ),
        (Constraint("grammar", "start: A\nA: " + 10 * "/a/ & " + "/a/"), "has more than 8 &"),
        (
            of_format({"type": "any_text", "excludes": 101 * ["a"]}),
            "has more than 100 triggers and excludes in its free texts",
        ),
        (Constraint("grammar", 'root ::= "a"\nroot ::= "b"'), "has the rule root twice"),
        (Constraint("grammar", 'root ::= "a" $'), "line 1, column 14: '$' is not expected here"),
        (Constraint("grammar", '"a"'), "has no rule root"),
        (Constraint("grammar", '"a" root ::= "a"'), "line 1, column 1: a rule begins as name ::="),
        (Constraint("grammar", "start: %json {}"), "has %json or %import: send a schema"),
        (Constraint("grammar", 'start: "a" b'), 'unknown name: "b"'),
        (Constraint("structural_tag", "{"), "is no JSON: "),
        (Constraint("structural_tag", "[]"), "must be an object with a format"),
        (of_format({"type": "tag", "begin": "a"}), "a format of type 'tag' is not complete"),
        (
            of_format({"type": "star", "content": {"type": "any_text", "max_tokens": 3}}),
            "any_text.max_tokens is for the first tag of an answer",
        ),
        (
            of_format({"type": "json_schema", "json_schema": {}, "style": "cohere_xml"}),
            "json_schema.style 'cohere_xml': use json, qwen_xml, minimax_xml, glm_xml",
        ),
        (of_format({"type": "token", "token": "no such"}), "'no such' is no token of this model"),
        (
            of_format({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG["format"]]}),
            "each tag must begin with one of the triggers",
        ),
        (
            of_format({"type": "json_schema", "json_schema": {"items": {"enum": ["a"]} | ODD}}),
            "in a schema of the structural tag: #/items: regular expression, position 1",
        ),
    ],
)
def test_what_cannot_be_compiled_says_where(forms, constraint, words):
    with pytest.raises(FormError) as caught:
        forms.compile(constraint)

    assert words in str(caught.value)


def test_a_strict_schema_may_have_titles_next_to_a_reference(forms):
    schema = {
        "$defs": {"A": {**OBJ, "properties": {"n": {**INT, "minimum": 3}}, "required": ["n"]}},
        **OBJ,
        "properties": {
            "a": {"$ref": "#/$defs/A", "title": "A", "description": "one", "default": {}},
            "any": {},
        },
        "required": ["a"],
    }

    assert takes(forms, strict(schema), '{"a": {"n": 3}}')
    assert not takes(forms, strict(schema), '{"a": {"n": 2}}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**STR, "maxLength": 3}, '"a é"', '"a\tb"'),
        ({**STR, "minLength": 2}, '"abc"', '"a\x1b"'),
        ({**STR, "minLength": 1, "maxLength": 1}, '"a"', '""'),
        ({**STR, "maxLength": 300}, f'"{300 * "é"}"', '"a\tb"'),
        ({**STR, "maxLength": 300}, '"a"', f'"{301 * "a"}"'),
        ({**STR, "minLength": 200}, f'"{200 * "a"}"', f'"{200 * "a"}\t"'),
        ({"type": ["string", "null"], "maxLength": 2}, "null", '"abc"'),
        ({**OBJ, "propertyNames": {"maxLength": 2}}, '{"ab": 1}', '{"a\t": 1}'),
        ({**STR, "pattern": '^a"+[b"]$'}, r'"a\"b"', '"a"b"'),
        ({**STR, "format": "uri", "pattern": "^https://a$"}, '"https://a"', '"http://a"'),
        ({**STR, "pattern": r"^C:\\\w+$"}, r'"C:\\x"', r'"C:\x"'),
        ({**STR, "pattern": r"^[\n]$"}, r'"\n"', '"\n"'),
        ({**STR, "pattern": '^["]{2}$'}, r'"\"\""', '""""'),
        ({**STR, "pattern": r"^[\\]$"}, r'"\\"', '"\\"'),
        ({**STR, "pattern": r"^[\u0000-\x1f]$"}, r'"\u001f"', '"\x1f"'),
        ({**STR, "pattern": r"^[^ -\uffff\u{10000}-\u{10ffff}]$"}, r'"\t"', '"\t"'),
        ({**STR, "pattern": r"^\cJ[\cJ]\u{a}\0$"}, r'"\n\n\n\u0000"', '"\n\n\n\0"'),
        ({**STR, "pattern": "^[^]$"}, '"a"', '"\n"'),
        ({**STR, "pattern": r"^[a\n]$"}, '"a"', '"\n"'),
        ({**STR, "pattern": "^(?!a)[a-c]$"}, '"b"', '"d"'),
        ({**STR, "pattern": r"^(\x41\n)+$"}, r'"A\nA\n"', '"A\nA\n"'),
        (
            {**OBJ, "patternProperties": {'^"$': {}}, "additionalProperties": False},
            r'{"\"": 1}',
            '{""": 1}',
        ),
    ],
)
def test_a_string_under_a_length_or_a_pattern_is_one_that_json_can_hold(forms, schema, good, bad):
    assert takes(forms, of(schema), good)
    assert not takes(forms, of(schema), bad)


def test_a_string_under_a_large_length_in_a_tag_is_one_that_json_can_hold(forms):
    schema = {**OBJ, "properties": {"a": {"maxLength": 300, **STR}}}
    constraint = of_tag(schema, strict=False)

    assert takes(forms, constraint, '{"a": "b c"}')
    assert not takes(forms, constraint, '{"a": "b\tc"}')


@pytest.mark.parametrize(
    ("style", "text"),
    [({}, r'{"a":"\"b\""}'), ({"style": "qwen_xml"}, '<parameter=a>\n"b"\n</parameter>')],
)
def test_a_pattern_in_a_tag_is_of_the_text_as_its_style_writes_it(forms, style, text):
    schema = {**OBJ, "properties": {"a": {**STR, "pattern": '^"b"$'}}, "required": ["a"]}
    tag = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": schema, **style},
    }

    assert takes(forms, Constraint("structural_tag", json.dumps(tag)), text)
