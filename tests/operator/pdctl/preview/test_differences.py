"""Fields of an object that is there, and that applying a file would change."""

import json

from pdcluster_schema.pdcluster import PDCluster
from pdctl.preview.differences import LAST_APPLIED, changed_fields, without_others
from tests.operator.pdcluster_api.plan.clusters import make_cluster


def with_metadata(annotations: dict[str, str], labels: dict[str, str]) -> PDCluster:
    made = make_cluster()
    update = {"annotations": annotations, "labels": labels}
    return made.model_copy(update={"metadata": made.metadata.model_copy(update=update)})


def test_annotations_and_labels_of_others_stay_and_those_of_the_file_before_go() -> None:
    applied = json.dumps({"metadata": {"annotations": {"dropped": "1"}, "labels": None}})
    there = with_metadata(
        {LAST_APPLIED: applied, "pdcluster.io/verify": "now", "dropped": "1", "team": "a"},
        {"added-by": "argo"},
    )
    new = with_metadata({"team": "b"}, {})

    assert changed_fields(without_others(there, new), new) == [
        ("metadata.annotations.dropped", "1", None),
        ("metadata.annotations.team", "a", "b"),
    ]


def test_an_object_that_was_never_applied_loses_nothing() -> None:
    new = with_metadata({}, {})
    for applied in ({}, {LAST_APPLIED: "no JSON"}, {LAST_APPLIED: "[]"}):
        there = with_metadata({**applied, "of": "others"}, {"of": "others"})
        assert changed_fields(without_others(there, new), new) == []
