"""The pages about Kubernetes and docs/gitops.md say what is: reasons, rights, values,
commands and objects.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from pdcluster_schema import conditions
from tests.chart.helm_chart import CHART
from tests.chart.rights import OBJECTS

ROOT = Path(__file__).parents[2]
TYPES = {
    conditions.READY,
    conditions.SERVING,
    conditions.RECONCILING,
    conditions.STALLED,
    conditions.DISCOVERY_READY,
    conditions.DISCOVERY_IN_SYNC,
    conditions.DISAGGREGATING,
    conditions.KV_TRANSFER_VERIFIED,
    conditions.INGRESS_READY,
    conditions.ACCELERATORS_IN_USE,
    conditions.KV_TIERS_AVAILABLE,
    conditions.OTHER_MODELS_SERVED,
    conditions.ROLLOUT_PAUSED,
    conditions.ROLLED_BACK,
}
PAGES = ("kubernetes", "operations", "troubleshooting")
KUBERNETES = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
GITOPS = (ROOT / "docs" / "gitops.md").read_text()


def section(title: str) -> str:
    """One section of these pages."""
    return KUBERNETES.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


def yaml_blocks(text: str) -> Iterator[dict[str, object]]:
    for block in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from yaml.safe_load_all(block)


def test_every_reason_is_explained_and_put_where_it_belongs() -> None:
    by_itself, _, needs_action = section("When a cluster is not Ready").partition(
        "These need action by a user"
    )
    events = {value for name, value in vars(conditions).items() if name.startswith("ROLLOUT_")} | {
        conditions.SCALED,
        conditions.DRAIN_CUT,
        conditions.LOST_POD_DELETED,
        conditions.AUTOSCALED,
        conditions.ADVISED,
        conditions.SCALERS_OVERRIDDEN,
    }
    fine = {
        conditions.AS_DECLARED,
        conditions.ETCD_ANSWERS,
        conditions.ANSWERING,
        conditions.OFFLOADING,
        conditions.KV_MOVED,
    }
    words = {
        value
        for name, value in vars(conditions).items()
        if name.isupper() and isinstance(value, str) and name != "CONDITIONS_FILE"
    }
    reasons = (
        words
        - TYPES
        - events
        - fine
        - set(conditions.ROLE_READY.values())
        - set(conditions.AUTOSCALING)
    )

    assert set(first_cells(needs_action)) - {"reason", "---"} == conditions.NEEDS_ACTION
    assert set(first_cells(by_itself)) - {"reason", "---"} == reasons - conditions.NEEDS_ACTION
    assert all(
        word in section("When a cluster is not Ready")
        for word in TYPES | fine | set(conditions.ROLE_READY.values())
    )


def test_conditions_of_the_crd_are_a_map_by_type_and_describe_each_type() -> None:
    crd = yaml.safe_load((ROOT / "crds" / "pdcluster.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    of_conditions = schema["properties"]["status"]["properties"]["conditions"]
    description = of_conditions["description"]
    types = TYPES | set(conditions.ROLE_READY.values()) | set(conditions.AUTOSCALING)

    assert {word for word in types if word not in description} == set()
    assert of_conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_everything_that_stands_in_the_autoscalers_way_is_explained() -> None:
    said = section("Scale by metrics")

    assert set(first_cells(said)) - {"condition", "---"} == set(conditions.AUTOSCALING)
    assert all(
        word in said
        for word in (conditions.AUTOSCALED, conditions.ADVISED, conditions.SCALERS_OVERRIDDEN)
    )


def test_every_right_is_explained_with_its_verbs() -> None:
    rows = [
        line for line in section("Rights of the operator").splitlines() if line.startswith("| ")
    ]
    told = {
        resource: {verb.strip() for verb in re.split("[,;]", row.split("|")[2])}
        for row in rows[2:]
        for resource in row.split("|")[1].strip().split(", ")
    }
    wanted: dict[str, set[str]] = {}
    for resource, verbs in OBJECTS.items():
        name = resource.partition("/")[2]
        wanted[name] = wanted.get(name, set()) | verbs

    assert set(told) == set(wanted)
    assert {resource for resource, verbs in wanted.items() if not verbs <= told[resource]} == set()


def test_every_value_is_described() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    told = {
        name for cell in first_cells(section("Install")) for name in re.findall(r"`(\w+)`", cell)
    }

    assert told == set(values)


def test_values_in_the_gitops_guide_are_the_charts() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = [
        given
        for one in yaml_blocks(GITOPS)
        for given in (
            one.get("spec", {}).get("values"),
            one.get("spec", {}).get("source", {}).get("helm", {}).get("valuesObject"),
        )
        if given
    ]

    assert len(found) == 2
    assert all(set(given) <= set(values) for given in found)
