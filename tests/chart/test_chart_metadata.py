"""The metadata that repositories of charts show, and the rules of chart-testing's `ct lint`
that need no network.
"""

import base64
import re
from pathlib import Path

import pytest
import yaml

from tests.chart.helm_chart import CHART

METADATA = yaml.safe_load((CHART / "Chart.yaml").read_text())
ANNOTATIONS = METADATA["annotations"]


def test_icon_is_the_file_and_no_address() -> None:
    kind, _, text = METADATA["icon"].partition(",")

    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(text) == (CHART / "icon.svg").read_bytes()


def test_chart_names_a_maintainer_and_has_a_readme() -> None:
    assert [sorted(maintainer) for maintainer in METADATA["maintainers"]] == [["name"]]
    assert "# PDCluster\n" in (CHART / "README.md").read_text()


def test_annotated_kinds_are_those_of_the_crds() -> None:
    crds = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]

    assert [
        (crd["kind"], crd["name"], crd["version"])
        for crd in yaml.safe_load(ANNOTATIONS["artifacthub.io/crds"])
    ] == [
        (crd["spec"]["names"]["kind"], crd["metadata"]["name"], crd["spec"]["versions"][0]["name"])
        for crd in crds
    ]
    assert all(isinstance(value, str) for value in ANNOTATIONS.values())


def test_annotated_example_is_a_valid_pdcluster() -> None:
    from pdcluster_schema.pdcluster import PDCluster

    (example,) = yaml.safe_load(ANNOTATIONS["artifacthub.io/crdsExamples"])

    assert PDCluster.model_validate(example).metadata.name == "chat"


@pytest.mark.parametrize(
    "path", [CHART / "Chart.yaml", CHART / "values.yaml"], ids=lambda p: p.name
)
def test_yaml_is_as_linters_of_charts_want_it(path: Path) -> None:
    text = path.read_text()

    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert re.findall(r"[ \t]+$|\t", text, re.MULTILINE) == []
    assert re.findall(r"^\s*#[^\s#!].*$", text, re.MULTILINE) == []  # a comment begins with a space
    assert re.findall(r"^.*[^\s#] #.*$", text, re.MULTILINE) == []  # two spaces before one
    assert re.findall(r"\{ | \}|\[ | \]", re.sub("#.*", "", text)) == []
