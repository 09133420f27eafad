"""Drift by managedFields, on sets of fields as the API server writes them; the server's own are in
tests/apiserver.
"""

import copy
from typing import Any

import pytest

from pdcluster_operator.writes.drift import (
    conflicting_managers,
    has_drifted,
    owns,
    prepared,
    stamped,
    writers,
)
from pdcluster_schema.labels import APPLIED

OURS: dict[str, Any] = {
    "f:metadata": {
        "f:annotations": {f"f:{APPLIED}": {}},
        "f:ownerReferences": {'k:{"uid":"u1"}': {}},
    },
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
        "spec": {
            "type": "ClusterIP",
            "selector": {"a": "b"},
            "ports": [{"name": "http", "port": 80}],
        },
    }


def applied(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "manager": "pdcluster-operator",
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsV1": OURS if fields is None else fields,
    }


def edited(fields: dict[str, Any], **entry: str) -> dict[str, Any]:
    return {
        "manager": "kubectl-edit",
        "operation": "Update",
        "apiVersion": "v1",
        "fieldsV1": fields,
        **entry,
    }


def live(*entries: dict[str, Any]) -> dict[str, Any]:
    """The object as it was applied, with these managers."""
    body = stamped(prepared(service()))
    body["metadata"]["managedFields"] = list(entries)
    return body


def drifted(*entries: dict[str, Any]) -> bool:
    return has_drifted(stamped(prepared(service())), live(*entries))


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


def test_an_object_as_it_was_applied_has_not_drifted():
    assert not drifted(applied())


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
def test_a_field_of_ours_that_was_changed_by_others_is_drift(path: tuple[str, ...]):
    assert drifted(applied(without(*path)))


def test_an_object_of_which_nothing_is_managed_any_more_has_drifted():
    assert drifted()


def test_another_manifest_than_was_applied_is_drift():
    desired = service()
    del desired["spec"]["type"]
    assert has_drifted(stamped(prepared(desired)), live(applied()))


@pytest.mark.parametrize(
    "fields",
    [
        {"f:spec": {"f:externalName": {}}},
        {"f:spec": {"f:ports": {'k:{"port":81,"protocol":"TCP"}': {".": {}, "f:port": {}}}}},
        {"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:nodePort": {}}}}},
        {"f:metadata": {"f:labels": {"f:x": {}}}, "f:data": {"f:x": {}}},
        {"f:spec": {"f:type": {}, "f:ports": {'k:{"port":80,"protocol":"TCP"}': {"f:port": {}}}}},
    ],
    ids=[
        "a field",
        "an item of a list",
        "a field of an item",
        "a label and a value",
        "what we say too",
    ],
)
def test_what_others_add_is_theirs_and_no_drift(fields: dict[str, Any]):
    assert not drifted(applied(), edited(fields))


def test_writers_are_others_that_set_more_than_metadata_and_status():
    spec = {"f:spec": {"f:externalName": {}}, "f:metadata": {"f:labels": {"f:x": {}}}}
    others = (
        edited({"f:metadata": {"f:annotations": {"f:x": {}}}}, manager="a-labeller"),
        edited({"f:status": {"f:x": {}}}, subresource="status", manager="a-controller"),
        edited({"f:spec": {"f:x": {}}}, manager="kube-controller-manager"),
        edited({"f:spec": {"f:replicas": {}}}, subresource="scale", manager="kubectl-scale"),
        edited(spec),
    )

    assert writers(live(applied(), *others)) == ["kubectl-edit", "kubectl-scale"]


def test_rivals_are_the_writers_of_fields_that_we_set():
    port = 'k:{"port":80,"protocol":"TCP"}'
    others = {
        "a-type": {"f:type": {}},
        "a-field": {"f:sessionAffinity": {}},
        "an-item": {"f:ports": {'k:{"port":81,"protocol":"TCP"}': {".": {}, "f:name": {}}}},
        "a-name": {"f:ports": {port: {".": {}, "f:port": {}, "f:name": {}}}},
        "a-field-of-an-item": {"f:ports": {port: {"f:port": {}, "f:nodePort": {}}}},
        "a-whole": {"f:selector": {}},
    }
    entries = [edited({"f:spec": fields}, manager=name) for name, fields in others.items()]

    assert conflicting_managers(live(applied(), *entries), service()) == [
        "a-name",
        "a-type",
        "a-whole",
    ]


@pytest.mark.parametrize(
    ("fields", "wanted", "expected"),
    [
        ({"f:a": {}}, {"a": {"b": [1]}}, True),  # owned as a whole
        ({"f:a": {".": {}}}, {"a": {"b": 1}}, False),
        ({"f:a": {".": {}}}, {"a": {}}, True),
        ({"f:a": {}}, {"a": 1, "b": []}, True),  # an empty list has no owner
        ({"f:a": {}}, {"a": 1, "b": 0}, False),
        ({"f:a": {'v:"x"': {}, "v:2": {}}}, {"a": ["x", 2]}, True),
        ({"f:a": {'v:"x"': {}}}, {"a": ["x", "y"]}, False),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "x"}]}, True),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "x", "v": 1}]}, False),
        ({"f:a": {'k:{"n":"x"}': {".": {}, "f:n": {}}}}, {"a": [{"n": "y"}]}, False),
        # q by default
        ({"f:a": {'k:{"p":1,"q":"TCP"}': {".": {}, "f:p": {}}}}, {"a": [{"p": 1}]}, True),
        (
            {"f:a": {'k:{"p":1,"q":"TCP"}': {".": {}, "f:p": {}}}},
            {"a": [{"p": 1, "q": "UDP"}]},
            False,
        ),
    ],
)
def test_owns_follows_structure(fields: dict[str, Any], wanted: dict[str, Any], expected: bool):
    assert owns(fields, wanted) is expected


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
