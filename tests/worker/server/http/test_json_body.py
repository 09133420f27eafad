"""Bodies are read as `json.loads` reads them, by whichever decoder, and bounded in their values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.json_body import INLINE_BYTES, MAX_CONTAINERS, parsed

"""Makes a body long enough for the decoders of long ones."""

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_a_long_body_has_the_value_that_json_reads(
    value: Any, is_ascii: bool, encoding: str
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    content = (text + " " * INLINE_BYTES).encode(encoding, "surrogatepass")

    assert repr(parsed(content)) == repr(json.loads(content))


def test_brackets_within_strings_are_not_counted() -> None:
    value = ["[{" * MAX_CONTAINERS, {"a": "}"}]

    assert parsed(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" + "[]," * MAX_CONTAINERS + "[]]", "the body has more than 65536 objects and lists"),
        (
            json.dumps(dict.fromkeys(map(str, range(200_000)), 1)),
            "an object of the body has more than 65536 members",
        ),
    ],
)
def test_a_body_of_too_many_values_is_refused(content: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parsed(content.encode())

    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
