"""The operator's rights are exactly these; a new one is added here, with its reason
in the chart.
"""

from collections import defaultdict
from typing import Any

import pytest
import yaml

from pdcluster_api.apiserver import kinds
from pdcluster_api.apiserver.kinds import ApplyStrategy, Kind
from pdcluster_operator.settings import Settings
from tests.chart.helm_chart import CHART, NAMESPACE, RELEASE, environment_of, helm, of_kind, render
from tests.chart.rights import KEPT, OBJECTS, OWNED, READ

DISCOVERY = {
    "apiextensions.k8s.io/customresourcedefinitions": {"list", "watch"},
    "/namespaces": {"list", "watch"},
}
LEASES = {
    "coordination.k8s.io/leases": {"create"},
    f"coordination.k8s.io/leases {RELEASE}-pdcluster": {"get", "update"},
}


def rights(role: dict[str, Any]) -> dict[str, set[str]]:
    """Verbs by group/resource, with the name that a rule is limited to."""
    found: dict[str, set[str]] = defaultdict(set)
    for rule in role["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    found[f"{group}/{resource} {name}".strip()] |= set(rule["verbs"])
    return dict(found)


def by_place(manifests: list[dict[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Rights of the operator by namespace; "" = everywhere.

    Goes by the bindings, so a role that is not bound gives nothing.
    """
    roles = {
        (r["kind"], r["metadata"].get("namespace", ""), r["metadata"]["name"]): r
        for r in manifests
        if r["kind"] in ("Role", "ClusterRole")
    }
    found: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
        assert [subject["kind"] for subject in binding["subjects"]] == ["ServiceAccount"]
        place = binding["metadata"].get("namespace", "")
        found[place] |= rights(roles[binding["roleRef"]["kind"], place, binding["roleRef"]["name"]])
    return dict(found)


def test_rights_are_exactly_these() -> None:
    assert by_place(render()) == {"": OBJECTS | DISCOVERY, NAMESPACE: LEASES}


def test_rights_end_at_the_watched_namespaces() -> None:
    found = by_place(render({"watchNamespaces": ["models", "research"]}))

    assert found == {NAMESPACE: LEASES, "models": OBJECTS, "research": OBJECTS}


def test_deleting_lost_pods_takes_two_rights_more() -> None:
    found = by_place(render({"watchNamespaces": ["models"], "deleteLostPods": True}))

    pods = {"/pods": OBJECTS["/pods"] | {"delete"}}
    assert found == {"": {"/nodes": {"get"}}, NAMESPACE: LEASES, "models": OBJECTS | pods}


def test_rights_in_the_operators_own_namespace_add_up() -> None:
    assert by_place(render({"watchNamespaces": [NAMESPACE]})) == {NAMESPACE: OBJECTS | LEASES}


@pytest.mark.parametrize("release", ["first", "second", "pdcluster", "pdcluster-" + "x" * 43])
def test_each_release_has_a_lease_of_its_own_and_may_write_no_other(release: str) -> None:
    manifests = [
        found
        for found in yaml.safe_load_all(
            helm("template", release, str(CHART), "--namespace", NAMESPACE)
        )
        if found
    ]
    lease = environment_of(manifests)["PDCLUSTER_LEASE_NAME"]

    assert lease.startswith(release[:52].rstrip("-"))
    assert by_place(manifests)[NAMESPACE][f"coordination.k8s.io/leases {lease}"] == {
        "get",
        "update",
    }
    assert (
        Settings.from_environment(
            {k: v for k, v in environment_of(manifests).items() if isinstance(v, str)}
        ).lease_name
        == lease
    )


def test_no_rights_are_made_where_an_admin_gives_them() -> None:
    made = {manifest["kind"] for manifest in render({"rbac": {"create": False}})}

    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & made


@pytest.mark.parametrize("kind", kinds.CHILDREN, ids=str)
def test_every_kind_that_the_operator_makes_may_be_made(kind: Kind) -> None:
    group = kind.api_version.rpartition("/")[0]

    assert OBJECTS[f"{group}/{kind.plural}"] == (
        KEPT if kind.strategy is ApplyStrategy.KEPT else OWNED
    )


def test_every_rule_has_its_reason() -> None:
    for name in ("_rules.tpl", "rbac.yaml"):
        lines = (CHART / "templates" / name).read_text().splitlines()
        rules = [
            index for index, line in enumerate(lines) if line.lstrip().startswith("- apiGroups:")
        ]
        reasons = [
            lines[index - 1].lstrip().startswith("#") or "verbs:" in lines[index - 1]
            for index in rules
        ]

        assert len(rules) > 3
        assert all(reasons)


def test_users_get_rights_through_the_roles_of_kubernetes() -> None:
    roles = {
        role["metadata"]["name"].rpartition(":")[2]: role
        for role in of_kind(render(), "ClusterRole")
    }
    labels = {
        name: {
            label.rpartition("-")[2]
            for label in roles[name]["metadata"]["labels"]
            if "aggregate-to-" in label
        }
        for name in ("view", "edit")
    }

    assert labels == {"view": {"view", "edit", "admin"}, "edit": {"edit", "admin"}}
    assert rights(roles["view"]) == {
        "pdcluster.io/pdclusters": READ,
        "pdcluster.io/pdpoolscalers": READ,
    }
    assert rights(roles["edit"]) == {
        "pdcluster.io/pdclusters": {"create", "update", "patch", "delete", "deletecollection"},
        "pdcluster.io/pdpoolscalers/scale": {"get", "update", "patch"},
    }
    assert len(of_kind(render({"rbac": {"aggregate": False}}), "ClusterRole")) == 1
