"""A grammar that is quicker to compile has the texts of the one that it is made of."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.native import library
from pdcluster_worker.structured_output.rules import endless, rules_of, simplified
from tests.worker.structured_output.schemas import of_schema, takes


def rules_for(schema: object) -> str:
    grammar = library().Grammar.from_json_schema(
        json.dumps(schema), True, None, None, False, 20, False, False
    )
    return str(grammar.to_string())


def strings(count: int, **bounds: int) -> dict[str, object]:
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"type": "string", **bounds} for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def test_many_bounded_strings_add_no_rules_to_those_of_one():
    one, many = (rules_of(simplified(rules_for(strings(n, maxLength=30)))) for n in (1, 80))

    assert len(many) - len(one) <= 79  # one for the rest of the object after each
    assert sum("plain_0_" in name for name in many) == 31


def test_strings_of_different_bounds_share_their_ends():
    properties = {f"p{n}": {"type": "string", "maxLength": n} for n in range(1, 81)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}

    found = [name for name in rules_of(simplified(rules_for(schema))) if "plain_" in name]

    assert len(found) == 81


def test_the_schemas_of_many_tools_share_their_rules():
    def num_rules(count: int) -> int:
        content = {"type": "json_schema", "json_schema": {"type": "object"}}
        tags = [
            {"type": "tag", "begin": f"<t{number}>", "content": content, "end": "</t>"}
            for number in range(count)
        ]
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": tags}}
        grammar = library().Grammar.from_structural_tag(json.dumps(tag))
        return len(rules_of(simplified(grammar.to_string())))

    assert num_rules(200) - num_rules(2) == 198  # one for each tag, and none for what is in it


@settings(max_examples=40, deadline=None)
@given(
    least=st.integers(0, 6),
    more=st.one_of(st.none(), st.integers(0, 6)),
    length=st.integers(0, 14),
)
def test_a_bounded_string_has_as_many_characters_as_its_bounds_say(forms, least, more, length):
    bounds = {"minLength": least} | ({} if more is None else {"maxLength": least + more})
    schema = {"type": "array", "items": {"type": "string", **bounds}}
    fits = least <= length and (more is None or length <= least + more)

    assert takes(forms, of_schema(schema), json.dumps([length * "é"], ensure_ascii=False)) == fits


def test_rules_of_a_user_that_are_called_like_the_chain_stay_as_they_are(forms):
    schema = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 1}}
    own = {"type": "grammar", "grammar": 'root ::= plain_0_1\nplain_0_1 ::= "yes"'}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [schema, own]}}
    constraint = Constraint("structural_tag", json.dumps(tag))

    assert takes(forms, constraint, '"a"yes')
    assert not takes(forms, constraint, '"ab"yes')


def test_a_budget_of_tokens_is_a_rule_of_its_own():
    text = 'root ::= ((a b))\na[max_tokens=3] ::= (("x"))\nb ::= (("x"))\nc ::= (("x"))\n'

    assert list(rules_of(simplified(text))) == ["root", "a[max_tokens=3]", "b"]


@pytest.mark.parametrize(
    ("text", "is_endless"),
    [
        ('root ::= (("x" a))\na ::= (("y" a))\n', True),
        ('root ::= (("x" a{0, 1}))\na ::= (("y" a{0, 3}))\n', False),
        ('root ::= ("" | ("x" root))\n', False),
        ('root ::= (("x"))\nunused ::= ((unused))\n', False),
        ('root ::= (("a | b" "root" [(root)] ))\n', False),
        ('root ::= (("x")) (=(root))\n', False),
        (
            'root ::= ((t))\nt ::= TagDispatch(\n  ("<a>", a),\n  loop=true\n)\na ::= (("x"))\n',
            False,
        ),
        ('root ::= ((t))\nt ::= TagDispatch(\n  ("<a>", a)\n)\na ::= (("x" a))\n', True),
    ],
)
def test_a_rule_that_needs_itself_is_endless(text, is_endless):
    assert endless(text) is is_endless
