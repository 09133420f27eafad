"""The metadata that repositories of charts show."""

import base64

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
