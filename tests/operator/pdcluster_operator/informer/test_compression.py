"""Packed bodies come back as they were, and small."""

import pytest

from pdcluster_operator.informer.cache import MAX_EXAMPLE_BYTES, NUM_EXAMPLES, Compressor
from tests.apiserver import cluster_objects as objects

KINDS = {
    body["kind"]: body
    for body in objects.everything({"metadata": {"uid": "u", "name": "c", "namespace": "d"}})
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_comes_back_whatever_was_packed_before_it(kind: str):
    compressor = Compressor()
    bodies = [{**KINDS[kind], "metadata": {"name": f"chat-{number}"}} for number in range(9)]
    packed = [compressor.compress(kind, body) for body in bodies]
    assert [each.body() for each in packed] == bodies


def test_what_says_the_same_as_an_example_takes_little():
    compressor = Compressor()
    first, *others = (
        compressor.compress(
            "StatefulSet", {**KINDS["StatefulSet"], "metadata": {"name": f"chat-{number}"}}
        )
        for number in range(NUM_EXAMPLES + 2)
    )
    assert max(len(each.content) for each in others) * 5 < len(first.content)


def test_examples_are_few_and_bounded_and_none_is_of_a_secret():
    compressor = Compressor()
    for number in range(NUM_EXAMPLES + 3):
        compressor.compress("Secret", {"data": {"tls.key": f"{number}"}})
        last = compressor.compress("ConfigMap", {"data": {"a": f"{number}" * 20_000}})
    assert len(last.examples) == MAX_EXAMPLE_BYTES
    assert "tls.key" not in repr(compressor)
    assert str(NUM_EXAMPLES).encode() not in last.examples
