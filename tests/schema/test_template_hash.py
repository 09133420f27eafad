"""Changes that replace no worker: another spelling of the same pods, and an edit of routers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.quantities import canonical_quantity
from pdcluster_schema.revision import (
    at_revision,
    canonical,
    revision_of,
    template_hash,
    written_revision,
)
from tests.schema.object_cases import CPU, Change, at, both, minimal
from tests.schema.revision_cases import ROLLS

LIMITS = "spec.roles.decode.resources.limits"
TEMPLATE = "spec.podTemplate"
CONTAINER = f"{TEMPLATE}.spec.containers"
TAINTS = [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}]

CLAIMS = [{"name": each, "resourceClaimTemplateName": each} for each in ("nic", "gpu")]


def affine(values: list[str]) -> Change:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": values}]}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return at(f"{TEMPLATE}.spec.affinity", {"nodeAffinity": node})


SAME: dict[str, tuple[Change, Change]] = {
    "quoted number": (at(LIMITS, {"cpu": 1}), at(LIMITS, {"cpu": "1"})),
    "thousandths": (at(LIMITS, {"cpu": "1.5"}), at(LIMITS, {"cpu": "1500m"})),
    "memory": (at(LIMITS, {"memory": "1Gi"}), at(LIMITS, {"memory": "1024Mi"})),
    "memory of a sidecar": (
        at(CONTAINER, [{"name": "x", "resources": {"requests": {"memory": "1Gi"}}}]),
        at(CONTAINER, [{"name": "x", "resources": {"requests": {"memory": "1024Mi"}}}]),
    ),
    "size of a volume": (
        at(f"{TEMPLATE}.spec.volumes", [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]),
        at(f"{TEMPLATE}.spec.volumes", [{"name": "v", "emptyDir": {"sizeLimit": 1 << 30}}]),
    ),
    "pull secrets": (
        at("spec.image.pullSecrets", ["a", "b"]),
        at("spec.image.pullSecrets", ["b", "a", "b"]),
    ),
    "endpoints": (
        at("spec.discovery.etcd.endpoints", ["a:1", "b:1"]),
        at("spec.discovery.etcd.endpoints", ["b:1", "a:1"]),
    ),
    "tolerations": (
        at(f"{TEMPLATE}.spec.tolerations", TAINTS),
        at(f"{TEMPLATE}.spec.tolerations", TAINTS[::-1]),
    ),
    "values of a selector": (affine(["a", "b"]), affine(["b", "a"])),
    "claims": (
        at("spec.roles.decode.resourceClaims", CLAIMS),
        at("spec.roles.decode.resourceClaims", CLAIMS[::-1]),
    ),
    "empty lists": (
        at(TEMPLATE, {}),
        at(TEMPLATE, {"spec": {"tolerations": [], "volumes": [], "initContainers": []}}),
    ),
    "no variables": (
        at(CONTAINER, [{"name": "worker", "image": "x"}]),
        at(CONTAINER, [{"name": "worker", "image": "x", "env": [], "resources": {}}]),
    ),
    "empty metadata": (at(TEMPLATE, {}), at(TEMPLATE, {"metadata": {}})),
    "empty labels": (
        at(TEMPLATE, {}),
        at(TEMPLATE, {"metadata": {"labels": {}}, "spec": {"affinity": {"podAffinity": {}}}}),
    ),
}

OTHER: dict[str, tuple[Change, Change]] = {
    "more": (at(LIMITS, {"memory": "1Gi"}), at(LIMITS, {"memory": "1025Mi"})),
    "order of a command": (
        at(CONTAINER, [{"name": "x", "command": ["a", "b"]}]),
        at(CONTAINER, [{"name": "x", "command": ["b", "a"]}]),
    ),
    "no arguments": (
        at(CONTAINER, [{"name": "worker"}]),
        at(CONTAINER, [{"name": "worker", "args": []}]),
    ),
    "an empty source of a volume": (
        at(f"{TEMPLATE}.spec.volumes", [{"name": "v", "emptyDir": {}}]),
        at(f"{TEMPLATE}.spec.volumes", [{"name": "v"}]),
    ),
    "a field that is removed": (
        at(TEMPLATE, {"spec": {"securityContext": None}}),
        at(TEMPLATE, {"spec": {"securityContext": {}}}),
    ),
    "text that looks like a quantity": (
        at(f"{TEMPLATE}.metadata", {"annotations": {"a": "1000m"}}),
        at(f"{TEMPLATE}.metadata", {"annotations": {"a": "1"}}),
    ),
}


def cluster(*changes: Change) -> PDCluster:
    document = minimal()
    both(*changes)(document)
    return parse(document)


def hashed(*changes: Change, role: str | None = None) -> str:
    return template_hash(cluster(*changes).spec, role)


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_another_spelling_makes_the_same_pods(one: Change, other: Change) -> None:
    assert hashed(one) == hashed(other)


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_says_something_else_makes_other_pods(one: Change, other: Change) -> None:
    assert hashed(one) != hashed(other)


@pytest.mark.parametrize("change", ROLLS.values(), ids=ROLLS)
def test_what_makes_a_revision_makes_other_pods(change: Change) -> None:
    assert hashed(change) != hashed()


def test_pods_of_workers_do_not_depend_on_routers_nor_theirs_on_workers() -> None:
    routed = at("spec.roles.router", {"pools": [CPU]})
    noted: dict[str, Any] = {"metadata": {"annotations": {"team": "a"}}}
    of_router = both(routed, at("spec.roles.router.podTemplate", noted))
    of_decode = both(routed, at("spec.roles.decode.podTemplate", noted))

    assert hashed() == hashed(routed) == hashed(of_router) != hashed(of_decode)
    assert hashed(routed, role="router") == hashed(of_decode, role="router")
    assert hashed(routed, role="router") != hashed(of_router, role="router")


def test_a_cluster_runs_under_the_name_of_the_revision_that_it_was_found_at() -> None:
    found = cluster()
    bound = at_revision(found, "0123abcd")

    assert revision_of(bound.spec) == "0123abcd"
    assert written_revision(bound.spec) == revision_of(found.spec)
    assert template_hash(bound.spec) == template_hash(found.spec)
    assert bound.model_dump() == found.model_dump()
    assert at_revision(bound, "0123abcd") is bound


@given(st.integers(0, 1 << 70), st.sampled_from(["", "m", "k", "M", "Ki", "Mi", "Gi", "Ti"]))
def test_the_spelling_of_a_quantity_keeps_its_value(number: int, suffix: str) -> None:
    once = canonical_quantity(f"{number}{suffix}")

    assert canonical_quantity(once) == once
    assert canonical({"limits": {"cpu": once}}) == {"limits": {"cpu": once}}
    if suffix in ("", "Ki"):
        in_bytes = number << (10 if suffix else 0)
        assert canonical_quantity(in_bytes) == canonical_quantity(str(in_bytes)) == once


@pytest.mark.parametrize("value", ["", "1Zi", "much", None, True, "1e9999", "9" * 5000])
def test_what_is_no_quantity_is_left_alone(value: Any) -> None:
    assert canonical_quantity(value) is value
