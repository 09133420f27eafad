"""Where workers run: accelerators, KV domain, spread."""

from tests.operator.manifests.rendering import matches, pod_of
from tests.operator.object_cases import at

GPU = at("spec.roles.decode.pools.0.gpu", "B300")
OWN = at("spec.accelerators", {"B300": {"resource": "example.com/b300", "nodeLabels": {"zone": "a", "gpu": "b300"}}})
RACK = {"domainLabel": "topology.kubernetes.io/rack"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def test_cpu_pool_runs_anywhere() -> None:
    spec = pod_of()["spec"]

    assert "affinity" not in spec
    assert "tolerations" not in spec


def test_gpu_pool_runs_on_nodes_with_that_gpu_and_tolerates_their_taint() -> None:
    spec = pod_of(GPU)["spec"]

    (term,) = spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-B300-SXM6-AC"]}]}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_definition_in_the_object_comes_first() -> None:
    spec = pod_of(GPU, OWN)["spec"]

    (term,) = spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert {expression["key"]: expression["values"] for expression in term["matchExpressions"]} == {"zone": ["a"], "gpu": ["b300"]}
    assert spec["containers"][0]["resources"]["limits"] == {"example.com/b300": "1"}


def test_workers_are_spread_over_nodes_where_possible() -> None:
    pod = pod_of()
    (spread,) = pod["spec"]["topologySpreadConstraints"]

    assert (spread["topologyKey"], spread["maxSkew"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", 1, "ScheduleAnyway")
    assert matches(spread["labelSelector"], pod["metadata"]["labels"])


def test_required_placement_keeps_both_roles_of_a_revision_in_one_domain() -> None:
    required = at("spec.placement", {**RACK, "mode": "Required"})
    prefill, decode = pod_of(required, role="prefill"), pod_of(required)
    (term,) = prefill["spec"]["affinity"]["podAffinity"][REQUIRED]

    assert decode["spec"]["affinity"]["podAffinity"][REQUIRED] == [term]
    assert term["topologyKey"] == RACK["domainLabel"]
    assert matches(term["labelSelector"], prefill["metadata"]["labels"])
    assert matches(term["labelSelector"], decode["metadata"]["labels"])
    assert not matches(term["labelSelector"], {**decode["metadata"]["labels"], "pdcluster.io/revision": "ffffffff"})


def test_preferred_placement_is_beside_the_accelerators_nodes() -> None:
    affinity = pod_of(GPU, at("spec.placement", RACK))["spec"]["affinity"]
    (preferred,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    assert preferred["podAffinityTerm"]["topologyKey"] == RACK["domainLabel"]
    assert "nodeAffinity" in affinity
