"""Decision of diff for each pair of a desired and a live object."""

from typing import Any

import pytest

from pdcluster_operator.writes.actions import ObjectName, Verb, stages
from pdcluster_operator.writes.drift import prepared, stamped
from pdcluster_schema.labels import SEEN_REPLICAS
from tests.apiserver import cluster_objects as objects
from tests.operator.differences import diff

OWNER = {"metadata": {"uid": "owner-uid", "name": objects.NAME, "namespace": "default"}}
UID = "owner-uid"
Manifest = dict[str, Any]


def as_applied(manifest: Manifest) -> Manifest:
    """Manifest as the API server stores it, when that owns every field as a whole."""
    body = stamped(prepared(manifest))
    content = {f"f:{key}": {} for key in body if key not in ("apiVersion", "kind", "metadata")}
    entry = {
        "manager": "pdcluster-operator",
        "operation": "Apply",
        "fieldsV1": {"f:metadata": {}, **content},
    }
    return {
        **body,
        "metadata": {
            **body["metadata"],
            "uid": "live-uid",
            "resourceVersion": "7",
            "managedFields": [entry],
        },
    }


def verbs(desired: list[Manifest], live: list[Manifest], **options: Any) -> list[tuple[Verb, str]]:
    return [(action.verb, str(action)) for action in diff(UID, desired, live, **options)]


def test_stages_keep_the_order_that_matters():
    made = [
        sorted({action.kind.name for action in stage})
        for stage in stages(diff(UID, objects.everything(OWNER), []))
    ]
    assert made == [
        [
            "ConfigMap",
            "ControllerRevision",
            "NetworkPolicy",
            "PDPoolScaler",
            "PodDisruptionBudget",
            "Secret",
            "Service",
            "ServiceAccount",
        ],
        ["StatefulSet"],
    ]


def test_kinds_of_one_name_in_two_groups_are_two():
    """The PodGroup of the old gang scheduler goes."""
    new, old = (
        {
            "apiVersion": version,
            "kind": "PodGroup",
            "metadata": objects.everything(OWNER)[0]["metadata"] | {"name": "worker"},
            "spec": {"minMember": 2},
        }
        for version in ("scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1")
    )
    assert diff(UID, [new], [as_applied(new)]) == []
    assert verbs([new], [as_applied(old)]) == [
        (Verb.CREATE, "PodGroup.scheduling.volcano.sh worker"),
        (Verb.DELETE, "PodGroup worker"),
    ]


def test_a_service_that_moves_traffic_is_changed_after_the_stateful_sets():
    everything = objects.everything(OWNER)
    live = [as_applied(manifest) for manifest in everything if manifest["kind"] != "StatefulSet"]
    wanted = [
        {**manifest, "spec": {**manifest["spec"], "selector": {"to": "others"}}}
        if manifest["kind"] == "Service"
        else manifest
        for manifest in everything
    ]
    staged = [
        {(action.verb, action.kind.name) for action in stage}
        for stage in stages(diff(UID, wanted, live))
    ]
    assert staged == [{(Verb.CREATE, "StatefulSet")}, {(Verb.APPLY, "Service")}]


def test_stages_delete_last_and_stateful_sets_before_what_they_use():
    everything = objects.everything(OWNER)
    kept = [manifest for manifest in everything if manifest["kind"] == "Service"]
    live = [as_applied(manifest) for manifest in everything if manifest["kind"] != "Service"]
    staged = [
        {(action.verb, action.kind.name) for action in stage}
        for stage in stages(diff(UID, kept, live))
    ]
    first, sets, others = staged
    # a pod that has the new budget beside the old one is never evicted
    assert first == {(Verb.DELETE, "PodDisruptionBudget"), (Verb.CREATE, "Service")}
    assert sets == {(Verb.DELETE, "StatefulSet")}
    assert (Verb.DELETE, "ConfigMap") in others
    assert {verb for verb, _ in others} == {Verb.DELETE}


def test_only_what_is_named_is_seen_until_what_it_owns_is_gone():
    live = [as_applied(manifest) for manifest in objects.everything(OWNER)]
    named = ObjectName("StatefulSet", objects.WORKLOAD)
    assert [
        str(action) for action in diff(UID, [], live, foreground=[named]) if action.foreground
    ] == [" ".join(named)]


@pytest.mark.parametrize(
    ("finalizers", "uid", "made"),
    [
        (["foregroundDeletion"], UID, [(Verb.DELETE, False)]),
        (["foregroundDeletion"], "another-uid", []),  # of an earlier PDCluster: not ours
        (["example.com/hold"], UID, []),
        ([], UID, []),
    ],
)
def test_what_is_desired_again_while_it_goes_in_the_foreground_does_not_wait_for_what_it_owns(
    finalizers, uid, made
):
    manifest = objects.stateful_set(OWNER)
    live = as_applied(objects.stateful_set({"metadata": {**OWNER["metadata"], "uid": uid}}))
    live["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers}
    assert [(action.verb, action.foreground) for action in diff(UID, [manifest], [live])] == made


def test_converge_deletes_what_is_ours_and_not_desired_stateful_sets_first():
    everything = [as_applied(manifest) for manifest in objects.everything(OWNER)]
    deleted = verbs([], everything)
    assert {verb for verb, _ in deleted} == {Verb.DELETE}
    names = [name for _, name in deleted]
    assert [name.split()[0] for name in names[:2]] == ["StatefulSet", "StatefulSet"]
    assert "Secret chat-tls" not in names  # the owner reference deletes it
    assert len(names) == len(everything) - 1


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": [{"uid": "another", "controller": True}]},
        {"ownerReferences": []},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
def test_converge_deletes_nothing_that_is_not_ours_or_goes_anyway(change: Manifest):
    body = as_applied(objects.config_map(OWNER))
    body["metadata"] |= change
    assert verbs([], [body]) == []


def test_converge_deletes_no_kind_that_it_does_not_make():
    pod = {**as_applied(objects.config_map(OWNER)), "kind": "Pod"}
    assert verbs([], [pod]) == []


def test_diff_names_a_kind_that_has_no_rule():
    with pytest.raises(ValueError, match=r"Ingress: add it to apiserver/kinds\.py"):
        diff(UID, [objects.manifest("Ingress", "networking.k8s.io/v1", "chat", OWNER)], [])


@pytest.mark.parametrize(
    "references",
    [
        [],
        [{"kind": "Deployment", "name": "chat", "uid": "x", "controller": True}],
        [{"kind": "PDCluster", "name": "other", "uid": "x"}],
    ],
)
def test_converge_refuses_an_object_of_another_owner(references: list[Manifest]):
    body = as_applied(objects.ingress_service(OWNER))
    body["metadata"]["ownerReferences"] = references
    assert verbs([objects.ingress_service(OWNER)], [body]) == [(Verb.REFUSE, "Service chat")]


def test_converge_waits_for_a_child_of_a_deleted_namesake_and_for_one_that_goes():
    old = as_applied(objects.ingress_service(OWNER))
    old["metadata"]["ownerReferences"] = [objects.owner_reference("uid-of-before")]
    going = as_applied(objects.config_map(OWNER, "other"))
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert verbs([objects.ingress_service(OWNER), objects.config_map(OWNER)], [old, going]) == []


def test_converge_applies_changed_content_to_that_very_object():
    [action] = diff(
        UID, [objects.config_map(OWNER, "new")], [as_applied(objects.config_map(OWNER, "old"))]
    )
    assert (action.verb, action.uid, action.desired["data"]) == (
        Verb.APPLY,
        "live-uid",
        {"policy.yaml": "new"},
    )


def test_converge_replaces_an_immutable_config_map_with_other_content():
    body = as_applied(objects.engine_config_map(OWNER, "other"))
    assert verbs([objects.engine_config_map(OWNER)], [body]) == [
        (Verb.REPLACE, f"ConfigMap {objects.WORKLOAD}")
    ]


def test_converge_does_not_delete_a_secret_that_was_made_immutable():
    body = {**as_applied(objects.secret(OWNER)), "immutable": True}
    changed = {**objects.secret(OWNER), "stringData": {"tls.crt": "another"}}
    name = ObjectName("Secret", body["metadata"]["name"])
    assert verbs([changed], [body], rewrite=[name]) == [(Verb.APPLY, f"Secret {name.name}")]


def test_converge_replaces_a_config_map_that_was_made_immutable():
    body = {**as_applied(objects.config_map(OWNER)), "immutable": True}
    assert verbs([objects.config_map(OWNER)], [body]) == [(Verb.REPLACE, "ConfigMap chat-policy")]


def test_converge_writes_a_secret_once_and_again_only_on_request():
    old = as_applied(objects.secret(OWNER))
    new = {**objects.secret(OWNER), "stringData": {"tls.crt": "newer"}}
    assert verbs([new], [old]) == []
    assert verbs([new], [old], rewrite=[ObjectName("Secret", "chat-tls")]) == [
        (Verb.APPLY, "Secret chat-tls")
    ]


@pytest.mark.parametrize("make", [objects.secret, objects.record])
def test_converge_puts_back_the_labels_of_what_it_does_not_compare(make: Any):
    body = as_applied(make(OWNER))
    body["metadata"]["labels"] = {"app.kubernetes.io/name": "pdcluster", "theirs": "x"}
    [action] = diff(UID, [make(OWNER)], [body])
    assert action.verb is Verb.PATCH
    assert action.patch is not None
    assert set(action.patch) == {"metadata"}
    assert set(action.patch["metadata"]) == {"labels"}
    assert "pdcluster.io/cluster" in action.patch["metadata"]["labels"]
    assert "app.kubernetes.io/name" not in action.patch["metadata"]["labels"]


def test_converge_leaves_a_record_alone():
    body = as_applied({**objects.record(OWNER), "data": {"other": 1}})
    assert verbs([objects.record(OWNER)], [body]) == []


def test_converge_leaves_the_replicas_of_a_scaler_to_the_user():
    desired = objects.scaler(OWNER)
    del desired["spec"]["replicas"]
    assert verbs([desired], [as_applied(objects.scaler(OWNER, replicas=5))]) == []


def test_converge_writes_a_request_and_what_was_seen_together():
    [action] = diff(
        UID,
        [objects.scaler(OWNER, replicas=3, seen=3)],
        [as_applied(objects.scaler(OWNER, replicas=5, seen=1))],
    )
    assert action.verb is Verb.PATCH
    assert action.patch == {
        "metadata": {"annotations": {SEEN_REPLICAS: "3"}},
        "spec": {"replicas": 3},
    }


def test_what_was_as_it_should_be_is_compared_again_only_after_a_change():
    old, new = objects.config_map(OWNER), objects.config_map(OWNER, "new")
    same, settled = as_applied(old), dict[ObjectName, bytes]()
    assert verbs([old], [same], settled=settled) == []
    drifted = {**same, "metadata": {**same["metadata"], "managedFields": []}}
    assert verbs([old], [drifted], settled=settled) == []  # no object changes without its version
    applied = [(Verb.APPLY, "ConfigMap chat-policy")]
    assert verbs([new], [same], settled=settled) == applied
    for mark in ({"resourceVersion": "8"}, {"uid": "another"}):
        changed = {**drifted, "metadata": {**drifted["metadata"], **mark}}
        for _ in range(2):  # what was found to differ is not settled
            assert verbs([old], [changed], settled=settled) == applied


def test_a_secret_that_is_to_be_written_again_is_never_settled():
    body, settled = as_applied(objects.secret(OWNER)), dict[ObjectName, bytes]()
    new = {**objects.secret(OWNER), "stringData": {"tls.crt": "newer"}}
    name = ObjectName("Secret", "chat-tls")
    assert verbs([new], [body], settled=settled) == []
    assert verbs([new], [body], settled=settled, rewrite=[name]) == [
        (Verb.APPLY, "Secret chat-tls")
    ]


def test_objects_that_are_not_desired_any_more_are_forgotten():
    settled = dict[ObjectName, bytes]()
    diff(UID, [objects.config_map(OWNER)], [as_applied(objects.config_map(OWNER))], settled=settled)
    assert [name.kind for name in settled] == ["ConfigMap"]
    diff(UID, [], [], settled=settled)
    assert settled == {}
