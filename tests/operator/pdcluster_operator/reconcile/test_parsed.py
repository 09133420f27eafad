"""Parsed PDClusters: once a generation, and a bounded number."""

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_operator.reconcile.observation import ParsedClusters
from pdcluster_schema.faults import InvalidObjectError
from tests.operator.bodies import cluster

POOLS = {"pools": [{"name": "cpu", "replicas": 1}]}


def live(uid: str = "u", generation: int = 1, name: str = "tiny") -> Live:
    body = cluster()
    spec = {"model": {"name": name, "path": "/m"}, "roles": {"mixed": POOLS}}
    metadata = {**body["metadata"], "uid": uid, "generation": generation}
    return Live({**body, "metadata": metadata, "spec": spec}, [])


def test_an_object_is_parsed_once_a_generation():
    parsed = ParsedClusters()
    first = parsed.of(live())
    assert parsed.of(live()) is first
    assert parsed.of(live(generation=2, name="other")).spec.model.name == "other"
    assert parsed.of(live(uid="another", name="third")).spec.model.name == "third"


def test_one_that_is_wrong_is_no_reason_to_forget_another():
    parsed = ParsedClusters()
    first = parsed.of(live())
    with pytest.raises(InvalidObjectError):
        parsed.of(live(uid="wrong", name=""))
    assert parsed.of(live()) is first
