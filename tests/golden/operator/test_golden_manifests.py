"""Manifests of every example and of an object with everything, and names on /metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.operator.golden_yaml import RECORDS, as_yaml
from tests.golden.operator.operator_adapter import UID, ZEROS, manifests, metrics, rendered
from tests.golden.records import check, check_names
from tests.schema.object_cases import FULL, minimal

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
FOLDER = RECORDS / "manifests"


def everything() -> dict[str, Any]:
    document = minimal()
    FULL(document)
    return document


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_of_an_example(path: Path) -> None:
    check(FOLDER / path.name, as_yaml(list(manifests(yaml.safe_load(path.read_text())))))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pdctl_renders_what_the_operator_makes(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    found = rendered(document)
    for scaler in (each for each in found if each["kind"] == "PDPoolScaler"):
        assert scaler["spec"].pop("replicas") == int(*scaler["metadata"]["annotations"].values())

    assert in_order(found) == in_order([of_pdctl(each) for each in manifests(document)])


def of_pdctl(manifest: Any) -> Any:
    """Without what is for a cluster to give: owner and UID, keys and certificates."""
    plain: Any = json.loads(json.dumps(manifest).replace(UID, ZEROS))
    del plain["metadata"]["ownerReferences"]
    if plain["kind"] == "Secret":
        plain["metadata"].pop("annotations", None)
        plain["data"] = dict.fromkeys(plain["data"], "")
    return plain


def in_order(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def test_manifests_of_an_object_with_everything() -> None:
    check(FOLDER / "everything.yaml", as_yaml(list(manifests(everything()))))


def test_every_record_of_manifests_has_its_example() -> None:
    check_names(FOLDER, ["everything.yaml", *(path.name for path in EXAMPLES)])


def test_metrics() -> None:
    found = sorted(metrics(), key=lambda family: family["name"])
    check(RECORDS / "metrics.yaml", as_yaml(found))
