"""Each format of a structural tag takes its own texts alone."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.compiler import ConstraintCompiler
from pdcluster_worker.structured_output.lark import FormError
from pdcluster_worker.structured_output.structural_tags import ThinkingBudget
from tests.worker.structured_output.schemas import takes

NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TEXT = {"type": "any_text"}
ARGUMENTS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "few": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["a", 3]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        "maybe": {"anyOf": [{"const": "x"}, {"type": "null"}]},
    },
    "required": ["text"],
    "$defs": {"n": {"type": "integer"}},
}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def xml(style: str, **schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": ARGUMENTS | schema, "style": style}


def token(number: int) -> dict[str, Any]:
    return {"type": "token", "token": number}


CALLS = {
    "triggers": ["<a", "<b"],
    "tags": [tag("<a>", NUMBER, "</a>"), tag("<ab>", NUMBER, "</ab>"), tag("<b>", TEXT, "</b>")],
}
LETTERS = {"trigger_tokens": [65], "tags": [tag(token(65), NUMBER, token(66))]}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"type": "const_string", "value": 'a"\n'}, ['a"\n'], ["a", ""]),
        ({"type": "star", "content": NUMBER}, ["", "12"], ["a"]),
        ({"type": "plus", "content": {"type": "const_string", "value": "ab"}}, ["abab"], ["", "a"]),
        (
            {
                "type": "repeat",
                "min": 1,
                "max": 2,
                "content": {"type": "const_string", "value": "a"},
            },
            ["a", "aa"],
            ["", "aaa"],
        ),
        (
            {
                "type": "repeat",
                "min": 2,
                "max": -1,
                "content": {"type": "const_string", "value": "a"},
            },
            ["aaa"],
            ["a"],
        ),
        ({"type": "optional", "content": NUMBER}, ["", "1"], ["a"]),
        ({"type": "sequence", "elements": []}, [""], ["a"]),
        ({"type": "any_text", "max_chars": 2, "excludes": ["x"]}, ["", "é\n"], ["abc", "x"]),
        (tag("<", {"type": "any_text", "excludes": ["no"]}, ">"), ["<a b>"], ["<no>", "<a>b"]),
        (tag("<", TEXT, ["/>", "!>"]), ["<a/>", "<a!>"], ["<a>", "<a/>b"]),
        ({"type": "or", "elements": [tag("<", TEXT, ">"), NUMBER]}, ["<a>", "12"], ["<a", "a"]),
        (
            {"type": "triggered_tags", **CALLS},
            ["", "a < b", "x<a>1</a>y<b>z</b>", "<ab>1</ab>"],
            ["<a", "<a>x</a>", "<ac>"],
        ),
        (
            {"type": "triggered_tags", **CALLS, "stop_after_first": True},
            ["x", "x<a>1</a>"],
            ["<a>1</a>x"],
        ),
        (
            {"type": "triggered_tags", **CALLS, "at_least_one": True},
            ["<a>1</a>", "<a>1</a>x<b></b>"],
            ["", "x<a>1</a>"],
        ),
        (
            {"type": "triggered_tags", **CALLS, "at_least_one": True, "stop_after_first": True},
            ["<a>1</a>"],
            ["", "<a>1</a>x"],
        ),
        (
            tag("[", {"type": "triggered_tags", **CALLS, "excludes": ["no"]}, "]"),
            ["[]", "[x<a>1</a>y]"],
            ["[no]", "[x]y"],
        ),
        (
            {"type": "dispatch", "rules": [["<n>", NUMBER]], "loop": False},
            ["x", "x<n>1"],
            ["<n>x", "<n>1x"],
        ),
        ({"type": "dispatch", "rules": [["<n>", tag("", NUMBER, ";")]]}, ["<n>1;x<n>2;"], ["<n>;"]),
        (
            {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": ","},
            ["", "<a>1</a>", "<a>1</a>,<b>x</b>"],
            ["<a>1</a><b>x</b>", ","],
        ),
        (
            {"type": "sequence", "elements": [token(65), {"type": "token", "token": "b"}]},
            ["Ab"],
            ["A", "AB"],
        ),
        ({"type": "exclude_token", "exclude_tokens": [65, "b"]}, ["a"], ["A", "b", ""]),
        ({"type": "any_tokens", "exclude_tokens": [65], "max_tokens": 2}, ["", "ab"], ["A", "abc"]),
        ({"type": "token_triggered_tags", **LETTERS}, ["", "xA1Bx"], ["A", "xA"]),
        (
            {"type": "token_triggered_tags", **LETTERS, "at_least_one": True},
            ["A1B", "A1BxA2B"],
            ["", "xA1B"],
        ),
        (
            {"type": "token_triggered_tags", **LETTERS, "stop_after_first": True},
            ["x", "xA1B"],
            ["A1Bx"],
        ),
        ({"type": "grammar", "grammar": 'root ::= "a" other*\nother ::= "b"'}, ["a", "abb"], ["b"]),
        (
            xml("qwen_xml"),
            [
                "<parameter=text>\na b\n</parameter>",
                "<parameter=text>x</parameter>\n<parameter=few>abc</parameter>"
                "\n<parameter=kind>a</parameter>\n<parameter=list>[1, 2]</parameter>",
                "<parameter=text></parameter><parameter=maybe>x</parameter>",
                "<parameter=text></parameter><parameter=maybe> null</parameter>",
            ],
            [
                "",
                "<parameter=few>abc</parameter>",
                "<parameter=text>x</parameter><parameter=few>abcdef</parameter>",
                "<parameter=text>x</parameter><parameter=kind>b</parameter>",
                '<parameter=text>x</parameter><parameter=list>["a"]</parameter>',
                "<parameter=text>x</parameter><parameter=other>x</parameter>",
            ],
        ),
        (
            xml("minimax_xml", additionalProperties=True, required=[]),
            ["", '<parameter name="other">x</parameter>'],
            ['<parameter name="0">x</parameter>'],
        ),
        (
            xml("glm_xml"),
            ["<arg_key>text</arg_key>\n<arg_value>x</arg_value>"],
            ["<arg_key>text</arg_key>"],
        ),
    ],
)
def test_a_format_takes_its_own_texts_alone(
    forms: ConstraintCompiler, form: Any, right: list[str], wrong: list[str]
) -> None:
    constraint = Constraint(
        "structural_tag", json.dumps({"type": "structural_tag", "format": form})
    )

    assert [text for text in right if not takes(forms, constraint, text)] == []
    assert [text for text in wrong if takes(forms, constraint, text)] == []


def nested(form: Any, depth: int) -> Any:
    for _ in range(depth):
        form = tag("<", form, ["a", "b"])
    return form


def doubling(depth: int) -> dict[str, Any]:
    steps = {f"d{n}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(depth)}
    return {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": {**steps, f"d{depth}": {}}}


COPIED = {
    "properties": {f"p{n}": {"type": "integer"} for n in range(300)},
    "$defs": {"long": {"enum": ["a" * 3000]}},
}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (tag("<", TEXT | {"max_tokens": "5"}, ">"), "max_tokens must be a whole number"),
        ({"type": "any_tokens", "max_tokens": "1} %json {} TEXT{1"}, "max_tokens must be a whole"),
        ({"type": "repeat", "min": "0", "max": 1, "content": TEXT}, "min must be a whole number"),
        (TEXT | {"max_chars": "1})|(a{1"}, "max_chars must be a whole number"),
        (nested(TEXT, 30), "has more than 5000 formats"),
        (xml("qwen_xml", **doubling(30)), "more than 5000 branches"),
        (xml("qwen_xml", **COPIED), "too long with the $defs of each"),
        (
            {"type": "or", "elements": 200 * [{"type": "const_string", "value": 3000 * "a"}]},
            "characters written out",
        ),
    ],
)
def test_a_format_that_would_grow_without_bound_is_refused_at_once(
    forms: ConstraintCompiler, form: Any, words: str
) -> None:
    with pytest.raises(FormError) as caught:
        forms.compile(Constraint("structural_tag", json.dumps({"format": form})))

    assert words in str(caught.value)


def test_a_tag_in_the_older_form_is_one_of_triggers(forms: ConstraintCompiler) -> None:
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    constraint = Constraint("structural_tag", json.dumps(older))

    assert takes(forms, constraint, "x<f>1</f>y")
    assert not takes(forms, constraint, "<f>a</f>")


def test_long_closing_text_keeps_no_mask_for_each_of_its_characters() -> None:
    """A budget is kept with its form, for later requests."""
    end = bytes(range(100))
    tokens = [bytes([code]) for code in end] + 32_000 * [b"a word"]
    budget = ThinkingBudget(b"", 1, end, tokens)
    words = np.empty(len(tokens) // 32 + 1, dtype=np.uint32)
    tracemalloc.start()
    try:
        for size in range(1, len(end)):
            words.fill(2**32 - 1)
            budget.bar(words, range(size))
            assert np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [
                size
            ]
        assert tracemalloc.get_traced_memory()[0] < 20 * words.nbytes
    finally:
        tracemalloc.stop()
