"""JSON for the API server: the same values after a way through JSON, and through YAML."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.quick_json import decoded, encoded, encoded_as_yaml

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


@given(st.text())
def test_a_text_is_the_same_in_yaml(text: str):
    assert yaml.safe_load(encoded_as_yaml({"text": text})) == {"text": text}


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x7f", "\x85", "\x9f", "\ufeff", "\uffff"])
def test_a_character_that_yaml_cannot_have_is_written_by_its_code(text: str):
    assert encoded_as_yaml(f"a{text}b") == f'"a\\u{ord(text):04x}b"'.encode()


def test_an_emoji_is_written_as_it_is():
    assert encoded_as_yaml("\U0001f600") == '"\U0001f600"'.encode()


def nested(levels: int) -> object:
    value: object = "é\u2028"
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("levels", [50, 95, 100, 105, 200, 400])
def test_a_value_of_many_levels_comes_back(levels: int):
    value = nested(levels)

    # compared as text: Python compares values only to some depth
    assert encoded(decoded(encoded(value))) == encoded(value)
    assert json.loads(encoded_as_yaml(value)) == value


def test_too_many_levels_are_a_value_error_with_their_limit():
    value, content = nested(5000), b'{"a":' * 9000 + b"1" + b"}" * 9000

    for fails in (lambda: encoded(value), lambda: decoded(content)):
        with pytest.raises(ValueError, match="fewer than 900"):
            fails()


@pytest.mark.parametrize("content", [b"", b"{", b"<html>", b"\xff"])
def test_what_is_not_json_is_a_value_error(content: bytes):
    with pytest.raises(ValueError, match="column"):
        decoded(content)
