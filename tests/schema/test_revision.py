"""The revision: what gives a cluster new pods, and what never does."""

from typing import Any

import pytest
from pydantic import Field

from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.revision import revision_of, template_hash
from tests.schema.object_cases import CPU, Change, at, minimal, without
from tests.schema.revision_cases import ROLLS, STAYS, revision


@pytest.mark.parametrize("change", ROLLS.values(), ids=ROLLS.keys())
def test_change_of_what_a_pod_is_made_of_is_a_new_revision(
    change: Change, document: dict[str, Any]
) -> None:
    change(document)

    assert revision(document) != revision(minimal())


def test_gang_of_workers_of_several_pods_is_a_new_revision(document: dict[str, Any]) -> None:
    at("spec.roles.decode.engine", {"dataParallelSize": 2})(document)
    at("spec.roles.decode.pools.0.podsPerReplica", 2)(document)
    before = revision(document)
    at("spec.placement", {"gang": "PodGroup"})(document)

    assert revision(document) != before


def test_every_such_change_is_a_revision_of_its_own() -> None:
    found = set()
    for change in ROLLS.values():
        document = minimal()
        change(document)
        found.add(revision(document))

    assert len(found) == len(ROLLS)


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS.keys())
def test_other_changes_leave_the_revision(change: Change, document: dict[str, Any]) -> None:
    change(document)

    assert revision(document) == revision(minimal())


def test_a_pool_of_accelerators_comes_and_goes_whatever_sizes_are_given(
    document: dict[str, Any],
) -> None:
    at("spec.engine", {"maxSequences": 64, "kvCacheMemory": "1Gi"})(document)
    before = parse(document).spec
    at("spec.roles.decode.pools", [CPU, {"name": "b300", "gpu": "B300", "replicas": 1}])(document)
    after = parse(document).spec

    assert revision_of(after) == revision_of(before)
    assert template_hash(after) == template_hash(before)


def test_same_engine_written_in_another_place_is_the_same_revision(
    document: dict[str, Any],
) -> None:
    """Only the engine of each role counts."""
    for role in ("prefill", "decode"):
        at(f"spec.roles.{role}.engine.blockSize", 32)(document)
    other = minimal()
    at("spec.engine.blockSize", 32)(other)

    assert revision(document) == revision(other)


def test_removed_change_gives_the_old_revision_back(document: dict[str, Any]) -> None:
    at("spec.engine.blockSize", 32)(document)
    without("spec.engine.blockSize")(document)

    assert revision(document) == revision(minimal())


def test_operator_that_knows_one_more_field_gives_the_same_revision(
    document: dict[str, Any],
) -> None:
    """Else an upgrade of the operator would roll every cluster."""

    class NextEngine(EngineSpec):
        lookahead: int = Field(default=0)

    spec = parse(document).spec
    later = PDClusterSpec.model_construct(**{**dict(spec), "engine": NextEngine()})

    assert "lookahead" in later.engine_of("decode").model_dump()
    assert revision_of(later) == revision_of(spec)


def test_revision_is_stable_between_versions(document: dict[str, Any]) -> None:
    """A change here means that an upgrade rolls every cluster: it must be on purpose."""
    assert revision(document) == "88e2aa26"
