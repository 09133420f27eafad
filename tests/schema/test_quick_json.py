"""JSON for the API server: the same values after a way through JSON, and through YAML."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.quick_json import (
    MAX_DEPTH,
    decoded,
    encoded,
    encoded_as_stored,
    encoded_as_yaml,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES)
def test_a_value_comes_back(value: object):
    assert decoded(encoded(value)) == value
    assert json.loads(encoded(value)) == value
    assert json.loads(encoded_as_yaml(value)) == value
    assert json.loads(encoded_as_stored(value)) == value


@given(st.text())
def test_a_text_is_the_same_in_yaml(text: str):
    assert yaml.safe_load(encoded_as_yaml({"text": text})) == {"text": text}


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x7f", "\x85", "\x9f", "\ufeff", "\uffff"])
def test_a_character_that_yaml_cannot_have_is_written_by_its_code(text: str):
    assert encoded_as_yaml(f"a{text}b") == f'"a\\u{ord(text):04x}b"'.encode()


def test_an_emoji_is_written_as_it_is():
    assert encoded_as_yaml("\U0001f600") == '"\U0001f600"'.encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (-2.5, "-2.5"),
        (1.0, "1"),
        (-0.0, "0"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (1.5e-10, "1.5e-10"),
        (1e16, "10000000000000000"),
        (1.2345678901234568e20, "123456789012345680000"),
        (1e21, "1e+21"),
        (-2.5e300, "-2.5e+300"),
        (2**63 - 1, "9223372036854775807"),
        (2**63, "9223372036854776000"),
        (-(2**63), "-9223372036854775808"),
        (10**19 + 1, "10000000000000000000"),
        (10**21, "1e+21"),
        ("1e21 :1.0 [2.0", '"1e21 :1.0 [2.0"'),
        ('"1.0', '"\\"1.0"'),
        ("<a & b>", r'"\u003ca \u0026 b\u003e"'),
        ("é\u2028\U0001f600\x7f\n\x1f", '"é\\u2028\U0001f600\x7f\\n\\u001f"'),
        (
            {"b": None, "é": [{}, []], "B": {"b": 1, "a": [1.0]}},
            '{"B":{"a":[1],"b":1},"b":null,"é":[{},[]]}',
        ),
    ],
)
def test_a_value_is_written_as_the_api_server_stores_it(value: object, text: str):
    assert encoded_as_stored({"key": value}) == f'{{"key":{text}}}'.encode()


def nested(levels: int) -> object:
    value: object = "é\u2028"
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("levels", [1, 50, MAX_DEPTH // 2])
def test_a_value_of_many_levels_comes_back(levels: int):
    value = nested(levels)

    # compared as text: Python compares values only to some depth
    assert encoded(decoded(encoded(value))) == encoded(value)
    assert json.loads(encoded_as_yaml(value)) == value
    assert json.loads(encoded_as_stored(value)) == value


def test_of_too_many_levels_the_deepest_are_null_and_all_else_is_read():
    deep = b'[{"}":' * 4500 + b'"]"' + b"}]" * 4500
    found = decoded(b'{"items":[{"a":"\\"{"},' + deep + b',{"b":[1]}]}')

    assert (found["items"][0], found["items"][2]) == ({"a": '"{'}, {"b": [1]})
    value, levels = found["items"][1], 2
    while value is not None:
        value, levels = value[0] if isinstance(value, list) else value["}"], levels + 1
    assert levels == MAX_DEPTH


def test_too_many_levels_are_not_written():
    with pytest.raises(ValueError, match="depth"):
        encoded(nested(5000))


@pytest.mark.parametrize("content", [b'{"a":' * 300, b"[" * 300 + b"}" * 300])
def test_too_many_levels_that_do_not_end_are_a_value_error(content: bytes):
    with pytest.raises(ValueError, match="column"):
        decoded(content)


@pytest.mark.parametrize("content", [b"", b"{", b"<html>", b"\xff"])
def test_what_is_not_json_is_a_value_error(content: bytes):
    with pytest.raises(ValueError, match="column"):
        decoded(content)
