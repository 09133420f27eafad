"""Drift by managedFields, on sets of fields as the API server writes them; the server's own are in tests/apiserver."""

import copy
from typing import Any

import pytest

from pdcluster_api.apiserver.kinds import SERVICE, SERVICE_ACCOUNT
from pdcluster_api.schema.labels import APPLIED
from pdcluster_operator.writes.drift import Drift, adds, drift, merged, owns, prepared, stamped, taken_over, writers

OURS: dict[str, Any] = {
    "f:metadata": {"f:annotations": {f"f:{APPLIED}": {}}, "f:ownerReferences": {'k:{"uid":"u1"}': {}}},
    "f:spec": {
        "f:type": {},
        "f:selector": {},
        "f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}}},
    },
}


def service() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "default", "ownerReferences": [{"uid": "u1"}]},
        "spec": {"type": "ClusterIP", "selector": {"a": "b"}, "ports": [{"name": "http", "port": 80}]},
    }


def applied(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"manager": "pdcluster-operator", "operation": "Apply", "apiVersion": "v1", "fieldsV1": OURS if fields is None else fields}


def edited(fields: dict[str, Any], **entry: str) -> dict[str, Any]:
    return {"manager": "kubectl-edit", "operation": "Update", "apiVersion": "v1", "fieldsV1": fields, **entry}


def live(*entries: dict[str, Any]) -> dict[str, Any]:
    """The object as it was applied, with these managers."""
    body = stamped(prepared(service()))
    body["metadata"]["managedFields"] = list(entries)
    return body


def drift_of(*entries: dict[str, Any]) -> Drift:
    return drift(SERVICE, stamped(prepared(service())), live(*entries))


def without(*path: str) -> dict[str, Any]:
    """Our fields after we lost one; what is left empty goes too, as the API server writes it."""
    fields = copy.deepcopy(OURS)
    parents = [fields]
    for part in path[:-1]:
        parents.append(parents[-1][part])
    for parent, part in zip(reversed(parents), reversed(path), strict=True):
        del parent[part]
        if parent:
            break
    return fields


def test_drift_of_an_object_as_it_was_applied_is_none():
    assert drift_of(applied()) is Drift.NONE


@pytest.mark.parametrize(
    "path",
    [
        ("f:spec",),
        ("f:spec", "f:type"),
        ("f:spec", "f:selector"),
        ("f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}'),
        ("f:spec", "f:ports", 'k:{"port":80,"protocol":"TCP"}', "f:name"),
        ("f:metadata", "f:annotations"),
        ("f:metadata", "f:ownerReferences", 'k:{"uid":"u1"}'),
    ],
)
def test_drift_is_ours_when_a_field_was_changed_by_others(path: tuple[str, ...]):
    assert drift_of(applied(without(*path))) is Drift.OURS


def test_drift_is_ours_when_nothing_is_managed_any_more():
    assert drift_of() is Drift.OURS


def test_drift_is_ours_when_another_manifest_was_applied():
    desired = service()
    del desired["spec"]["type"]
    assert drift(SERVICE, stamped(prepared(desired)), live(applied())) is Drift.OURS


@pytest.mark.parametrize(
    "fields",
    [
        {"f:spec": {"f:externalName": {}}},
        {"f:spec": {"f:ports": {'k:{"port":81,"protocol":"TCP"}': {".": {}, "f:port": {}}}}},
        {"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:nodePort": {}}}}},
        {"f:metadata": {"f:labels": {"f:x": {}}}, "f:data": {"f:x": {}}},
        {"f:spec": {"f:finalizers": {'v:"x"': {}}}},
    ],
)
def test_drift_is_foreign_when_others_added_fields(fields: dict[str, Any]):
    assert drift_of(applied(), edited(fields)) is Drift.FOREIGN


@pytest.mark.parametrize(
    "entry",
    [
        edited({"f:metadata": {"f:annotations": {"f:x": {}}, "f:finalizers": {'v:"x"': {}}}}),
        edited({"f:status": {"f:x": {}}}, subresource="status"),
        edited({"f:spec": {"f:x": {}}}, manager="kube-controller-manager"),
        edited({"f:spec": {"f:type": {}, "f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:port": {}}}}}),
    ],
    ids=["metadata", "status", "control plane", "what we say too"],
)
def test_drift_leaves_to_others_what_is_theirs(entry: dict[str, Any]):
    assert drift_of(applied(), entry) is Drift.NONE


def test_drift_counts_the_scale_subresource_and_an_update_under_our_own_name():
    scaled = edited({"f:spec": {"f:replicas": {}}}, subresource="scale")
    assert drift_of(applied(), scaled) is Drift.FOREIGN
    assert drift_of(applied(), {**scaled, "manager": "pdcluster-operator", "subresource": ""}) is Drift.FOREIGN


def test_drift_leaves_shared_fields_of_a_kind_to_others():
    desired = stamped(prepared({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat", "namespace": "default"}}))
    body = {**desired, "metadata": {**desired["metadata"], "managedFields": [applied(), edited({"f:imagePullSecrets": {}})]}}
    assert drift(SERVICE_ACCOUNT, desired, body) is Drift.NONE
    assert drift(SERVICE, desired, body) is Drift.FOREIGN


@pytest.mark.parametrize("name", ["loadBalancerIP", "loadBalancerClass", "externalIPs"])
def test_drift_leaves_the_addresses_of_a_service_to_load_balancers(name: str):
    entry = edited({"f:spec": {f"f:{name}": {}}}, manager="kube-vip")
    assert drift_of(applied(), entry) is Drift.NONE
    both = edited({"f:spec": {f"f:{name}": {}, "f:externalName": {}}}, manager="kube-vip")
    assert drift_of(applied(), both) is Drift.FOREIGN
    ours, others = taken_over(SERVICE, live(applied(), both), "2026-01-01T00:00:00Z")
    assert ours["fieldsV1"]["f:spec"] == {**OURS["f:spec"], "f:externalName": {}}
    assert others["fieldsV1"] == {"f:spec": {f"f:{name}": {}}}
    assert (writers(SERVICE, live(applied(), entry)), writers(SERVICE, live(applied(), both))) == ([], ["kube-vip"])


def test_taken_over_makes_ours_all_but_the_metadata_of_others():
    extra = {"f:spec": {"f:externalName": {}}, "f:metadata": {"f:labels": {"f:x": {}}}}
    status = edited({"f:status": {"f:x": {}}}, subresource="status")
    entries = taken_over(SERVICE, live(applied(), edited(extra), status), "2026-01-01T00:00:00Z")
    ours, others, kept = entries
    assert ours["fieldsV1"]["f:spec"] == {**OURS["f:spec"], "f:externalName": {}}
    assert (ours["manager"], ours["operation"], ours["apiVersion"]) == ("pdcluster-operator", "Apply", "v1")
    assert others["fieldsV1"] == {"f:metadata": extra["f:metadata"]}
    assert kept == status


def test_taken_over_leaves_no_empty_entry():
    entries = taken_over(SERVICE, live(edited({"f:spec": {"f:externalName": {}}})), "2026-01-01T00:00:00Z")
    assert [entry["fieldsV1"] for entry in entries] == [{"f:spec": {"f:externalName": {}}}]


@pytest.mark.parametrize(
    ("fields", "wanted", "expected"),
    [
        ({"f:a": {}}, {"a": {"b": [1]}}, True),  # owned as a whole
        ({"f:a": {".": {}}}, {"a": {"b": 1}}, False),
        ({"f:a": {".": {}}}, {"a": {}}, True),
        ({"f:a": {}}, {"a": 1, "b": []}, True),  # an empty list is owned by nobody
        ({"f:a": {}}, {"a": 1, "b": 0}, False),
        ({"f:a": {'v:"x"': {}, "v:2": {}}}, {"a": ["x", 2]}, True),
        ({"f:a": {'v:"x"': {}}}, {"a": ["x", "y"]}, False),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "x"}]}, True),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "x", "v": 1}]}, False),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "y"}]}, False),
        ({"f:a": {'k:{"p":1,"q":"TCP"}': {".": {}, "f:p": {}}}}, {"a": [{"p": 1}]}, True),  # q by default
        ({"f:a": {'k:{"p":1,"q":"TCP"}': {".": {}, "f:p": {}}}}, {"a": [{"p": 1, "q": "UDP"}]}, False),
    ],
)
def test_owns_follows_structure(fields: dict[str, Any], wanted: dict[str, Any], expected: bool):
    assert owns(fields, wanted) is expected


def test_adds_finds_a_field_inside_what_is_no_structure_of_ours():
    assert adds({"f:a": {"f:b": {}}}, {"a": "text"})
    assert adds({"f:a": {'k:{"n":"x"}': {}}}, {"a": "text"})
    assert adds({"f:a": {'v:"x"': {}}}, {"a": ["y"]})
    assert not adds({".": {}, "f:a": {'v:"x"': {}}}, {"a": ["x"]})


def test_merged_is_the_union():
    assert merged({"f:a": {"f:b": {}}, "f:c": {}}, {"f:a": {"f:d": {}}}) == {"f:a": {"f:b": {}, "f:d": {}}, "f:c": {}}


def test_prepared_drops_nulls_and_what_the_server_sets_and_encodes_string_data():
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": "chat",
            "namespace": "default",
            "uid": "u",
            "resourceVersion": "1",
            "managedFields": [],
            "labels": {"a": None},
        },
        "stringData": {"b": "text"},
        "data": {"a": "eA=="},
        "status": {"x": 1},
        "list": ({"x": None}, "y"),
    }
    assert prepared(manifest) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "chat", "namespace": "default", "labels": {}},
        "data": {"a": "eA==", "b": "dGV4dA=="},
        "list": [{}, "y"],
    }


def test_stamped_depends_on_content_alone():
    one = stamped(prepared(service()))
    other = stamped(prepared(dict(reversed(service().items()))))
    changed = service()
    changed["spec"]["type"] = "NodePort"
    assert one == other
    assert one["metadata"]["annotations"] != stamped(prepared(changed))["metadata"]["annotations"]
