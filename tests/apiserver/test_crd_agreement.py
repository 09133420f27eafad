"""The API server and the model accept the same objects, and mean the same by them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load, parse
from pdcluster_schema.revision import revision_of
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.objects import Objects
from tests.schema.object_cases import GOOD, Change, minimal

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("recipes/*.yaml")])


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD.keys())
def test_right_objects_are_accepted_and_mean_the_same_when_stored(
    change: Change, dry_clusters: Objects
) -> None:
    document = minimal()
    change(document)
    answer = dry_clusters.create(document, dry_run=True)

    assert answer.accepted, answer.causes
    stored, given = parse(answer.content), parse(document)
    assert stored.spec == given.spec
    assert revision_of(stored.spec) == revision_of(given.spec)


def test_a_null_section_is_dropped_where_the_model_asks_for_a_value(dry_clusters: Objects) -> None:
    """The one difference: what the API server stores says the same as a section that
    is not there.
    """
    document = minimal()
    document["spec"]["engine"] = None
    with pytest.raises(InvalidObjectError):
        parse(document)
    answer = dry_clusters.create(document, dry_run=True)

    assert answer.accepted
    assert "engine" not in answer.content["spec"]


def test_null_engine_fields_mean_the_same_as_fields_left_out(dry_clusters: Objects) -> None:
    document = minimal()
    nulls = {str(field.alias): None for field in EngineSpec.model_fields.values()}
    document["spec"]["engine"] = {**nulls, "maxBatchedTokens": 256}
    document["spec"]["roles"]["decode"]["engine"] = {**nulls, "maxSequences": 16}
    answer = dry_clusters.create(document, dry_run=True)

    assert answer.accepted, answer.causes


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(path: Path, control_plane: ControlPlane) -> None:
    assert load(path).kind == "PDCluster"
    printed = control_plane.kubectl(
        "create", "--dry-run=server", "--validate=strict", "--filename", str(path)
    )

    kinds = [
        document["kind"].lower() for document in yaml.safe_load_all(path.read_text()) if document
    ]
    assert [line.partition("/")[0].partition(".")[0] for line in printed.splitlines()] == kinds


def test_names_from_a_generator_are_read_back(clusters: Objects) -> None:
    document: dict[str, Any] = {**minimal(), "metadata": {"generateName": "chat-"}}
    answer = clusters.create(document)

    assert answer.accepted, answer.causes
    assert parse(answer.content).metadata.name.startswith("chat-")
