"""YAML text of files in ConfigMaps: that of PyYAML's own emitter, also where libyaml writes it."""

import runpy
import string
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.manifests import worker_config
from pdcluster_api.manifests.worker_config import yaml_text

READ_OTHERWISE = "|null|yes|~|<<|=|-|---|...|? a|a: b|a #b| a|a |12:30|2026-11-23|0x1|1_000|1e3"
WORDS = st.sampled_from(
    [*READ_OTHERWISE.split("|"), "--flag=value", "{{ messages }}", "x" * 127, "x" * 130]
)
TEXT = st.one_of(
    WORDS,
    st.text(string.ascii_letters + string.digits + string.punctuation + " ", max_size=200),
    st.text(max_size=20),
    st.lists(WORDS, min_size=10, max_size=40).map(" ".join),
)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(TEXT, inner, max_size=5)),
    max_leaves=30,
)


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def plain(value: Any) -> str:
    return yaml.dump(value, Dumper=Plain, sort_keys=False, default_flow_style=False)


@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_a_file_never_changes_by_what_emits_it(value: dict[str, Any]):
    assert yaml_text(value) == plain(value)


@pytest.mark.parametrize(
    "key", ["", "x" * 127, "x" * 128, "x" * 129, "\u00e9", "\U0001f600", "a\nb"]
)
def test_keys_that_libyaml_writes_otherwise_are_not_left_to_it(key: str):
    assert yaml_text({key: {key: [{key: 1}]}}) == plain({key: {key: [{key: 1}]}})


def test_equal_parts_are_written_out_each_time():
    shared = {"path": "/models"}
    assert yaml_text({"a": shared, "b": shared}) == "a:\n  path: /models\nb:\n  path: /models\n"


def test_without_libyaml_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(yaml, "CSafeDumper")
    found = runpy.run_path(str(worker_config.__file__))
    value = {"a": [{"b": 1}], "c": "yes"}
    assert found["yaml_text"](value) == yaml_text(value) == plain(value)
