"""Scheduling of workers: accelerators, KV domain, spread."""

from typing import Any

import pytest

from tests.operator.pdcluster_api.manifests.rendering import matches, pod_of
from tests.schema.object_cases import Change, at

GPU = at("spec.roles.decode.pools.0.gpu", "B300")
OWN = at(
    "spec.accelerators",
    {"B300": {"resource": "example.com/b300", "nodeLabels": {"zone": "a", "gpu": "b300"}}},
)
RACK = {"domainLabel": "topology.kubernetes.io/rack"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def test_definition_in_the_object_comes_first() -> None:
    spec = pod_of(GPU, OWN)["spec"]

    (term,) = spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert {expression["key"]: expression["values"] for expression in term["matchExpressions"]} == {
        "zone": ["a"],
        "gpu": ["b300"],
    }
    assert spec["containers"][0]["resources"]["limits"] == {"example.com/b300": "1"}


def node_terms(template: dict[str, Any], *changes: Change) -> Any:
    spec = pod_of(GPU, *changes, at("spec.podTemplate", {"spec": template}))["spec"]
    return spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]


def test_template_narrows_the_nodes_of_an_accelerator_and_widens_nothing() -> None:
    """A node must fit one term, and all of that: so every term has the accelerator's labels."""
    mine = [{"key": "zone", "operator": "In", "values": ["a"]}]
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    given = [{"matchExpressions": mine}, {"matchFields": [field]}, {}]
    ours = node_terms({})[0]["matchExpressions"]

    terms = node_terms({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": given}}}})

    assert terms == [
        {"matchExpressions": [*mine, *ours]},
        {"matchFields": [field], "matchExpressions": ours},
        {},
    ]


def test_template_that_prefers_nodes_leaves_the_required_ones() -> None:
    preferred = [
        {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}
    ]
    template = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    }

    assert node_terms(template) == node_terms({})


def test_template_may_take_the_node_affinity_away() -> None:
    spec = pod_of(GPU, at("spec.podTemplate", {"spec": {"affinity": {"nodeAffinity": None}}}))[
        "spec"
    ]

    assert spec["affinity"] == {}


@pytest.mark.parametrize("given", [[{"key": "mine", "operator": "Exists"}], [], None])
def test_tolerations_of_a_template_are_added_to_the_accelerators(
    given: list[dict[str, str]] | None,
) -> None:
    ours = pod_of(GPU)["spec"]["tolerations"]

    assert pod_of(GPU, at("spec.podTemplate", {"spec": {"tolerations": given}}))["spec"][
        "tolerations"
    ] == [*(given or []), *ours]


def tolerations(*given: dict[str, Any]) -> list[dict[str, Any]]:
    change = [at("spec.podTemplate", {"spec": {"tolerations": list(given)}})] if given else []
    found: list[dict[str, Any]] = pod_of(*change)["spec"]["tolerations"]
    return found


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_workers_leave_a_lost_node_after_half_a_minute(role: str) -> None:
    pools = {"pools": [{"name": "cpu", "replicas": 1}]}
    found = pod_of(at(f"spec.roles.{role}", pools), role=role)["spec"]["tolerations"]

    assert {(each["key"], each["effect"], each["tolerationSeconds"]) for each in found} == {
        ("node.kubernetes.io/not-ready", "NoExecute", 30),
        ("node.kubernetes.io/unreachable", "NoExecute", 30),
    }


def test_a_time_on_a_lost_node_in_the_template_is_the_users() -> None:
    own = {**tolerations()[1], "tolerationSeconds": 600}
    every = {"operator": "Exists"}

    assert tolerations(own) == [own, tolerations()[0]]
    assert tolerations(every) == [every]
    assert tolerations({**every, "effect": "NoSchedule"})[1:] == tolerations()
    assert tolerations({**every, "key": "mine"})[1:] == tolerations()


def test_template_that_names_the_accelerators_toleration_gets_it_once() -> None:
    ours = pod_of(GPU)["spec"]["tolerations"]

    assert (
        pod_of(GPU, at("spec.podTemplate", {"spec": {"tolerations": ours}}))["spec"]["tolerations"]
        == ours
    )


@pytest.mark.parametrize(
    "nonsense",
    [
        {"affinity": 1},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [1]}}}},
        {"tolerations": 1},
    ],
)
def test_template_that_makes_no_sense_is_left_to_the_api_server(nonsense: dict[str, Any]) -> None:
    spec = pod_of(GPU, at("spec.podTemplate", {"spec": nonsense}))["spec"]

    assert {name: spec[name] for name in nonsense} == nonsense


def test_required_placement_keeps_both_roles_of_a_revision_in_one_domain() -> None:
    required = at("spec.placement", {**RACK, "mode": "Required"})
    prefill, decode = pod_of(required, role="prefill"), pod_of(required)
    (term,) = prefill["spec"]["affinity"]["podAffinity"][REQUIRED]

    assert decode["spec"]["affinity"]["podAffinity"][REQUIRED] == [term]
    assert term["topologyKey"] == RACK["domainLabel"]
    assert matches(term["labelSelector"], prefill["metadata"]["labels"])
    assert matches(term["labelSelector"], decode["metadata"]["labels"])
    assert not matches(
        term["labelSelector"], {**decode["metadata"]["labels"], "pdcluster.io/revision": "ffffffff"}
    )
