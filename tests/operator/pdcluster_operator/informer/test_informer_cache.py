"""The informer cache: newest version wins, deletions are of one object and not of a name, nothing
unread is kept.
"""

import json
import random

import pytest

from pdcluster_api.apiserver.kinds import CHILD_OF_NAME, Key
from pdcluster_api.apiserver.observe import Live, observe, workload_of
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_operator.informer.cache import (
    MAX_BYTES,
    MAX_OWNERS,
    MAX_REMEMBERED,
    REMEMBER_SECONDS,
    Cache,
    Name,
    ObjectVersion,
    trim,
)
from pdcluster_operator.writes.actions import Verb
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.labels import GPU, GPUS_PER_REPLICA, VERIFY
from pdcluster_schema.load import parse_stored
from pdcluster_schema.values import MAX_SPEC_BYTES
from pdcluster_schema.workload import WorkloadId
from tests.operator import bodies
from tests.operator.differences import diff
from tests.operator.pods import pod_body, worker_body

KEY = Key(bodies.NAMESPACE, bodies.NAME)


def test_a_body_comes_back_as_it_was_and_belongs_to_its_cluster():
    cache, service = Cache(), bodies.child("Service", "chat", spec={"ports": [{"port": 8000}]})
    assert cache.put("PDCluster", bodies.cluster()) == KEY
    assert cache.put("Service", service) == KEY
    assert cache.get("Service", "default", "chat") == service
    assert cache.get("Service", "other", "chat") is None
    assert list(cache.children(KEY)) == [service]
    assert (cache.clusters(), len(cache)) == ([KEY], 2)


@pytest.mark.parametrize("late", [4, 5])
def test_an_older_or_equal_version_teaches_nothing(late: int):
    cache = Cache()
    cache.put("PDCluster", bodies.cluster())
    cache.put("Service", bodies.child("Service", "chat", 5, spec={"new": True}))
    assert cache.put("Service", bodies.child("Service", "chat", late, spec={})) is None
    assert next(cache.children(KEY))["spec"] == {"new": True}


def test_versions_are_compared_as_numbers():
    cache = Cache()
    cache.put("Service", bodies.child("Service", "chat", 9))
    assert cache.put("Service", bodies.child("Service", "chat", 10)) == KEY


def test_a_late_deletion_does_not_take_the_object_that_was_made_since():
    cache = Cache()
    old, new = (
        bodies.child("Service", "chat", 1, uid="old"),
        bodies.child("Service", "chat", 2, uid="new"),
    )
    cache.put("Service", old)
    cache.put("Service", new)
    assert cache.remove("Service", old) is None
    assert cache.remove("Service", new) == KEY
    assert (list(cache.children(KEY)), len(cache)) == ([], 0)


def test_a_late_answer_brings_no_deleted_object_back():
    now = 0.0
    cache, service = Cache(clock=lambda: now), bodies.child("Service", "chat", 5)
    deleted = bodies.child("Service", "chat", 9)
    cache.remove("Service", deleted)  # before the answer to what made it
    assert cache.put("Service", service) is None
    assert list(cache.children(KEY)) == []
    assert cache.put("Service", bodies.child("Service", "chat", 8, uid="another")) == KEY
    cache.remove("Service", bodies.child("Service", "chat", 8, uid="another"))
    # it had lost its label, and has it again
    assert cache.put("Service", bodies.child("Service", "chat", 10)) == KEY
    cache.remove("Service", bodies.child("Service", "chat", 11))
    now = REMEMBER_SECONDS + 1
    assert cache.put("Service", service) == KEY  # no answer is that late


def test_a_bounded_number_of_deletions_is_remembered_and_none_for_long():
    now = 0.0
    cache = Cache(clock=lambda: now)
    for number in range(MAX_REMEMBERED + 5):
        cache.remove("Service", bodies.child("Service", f"chat-{number}"))
    assert len(cache._removed) == MAX_REMEMBERED
    now = REMEMBER_SECONDS + 1
    cache.remove("Service", bodies.child("Service", "chat"))
    assert list(cache._removed) == ["uid-of-chat"]


def test_what_has_no_owner_is_not_kept():
    cache = Cache()
    ours = bodies.child("ControllerRevision", "record")
    of_the_controller = bodies.child(
        "ControllerRevision",
        "theirs",
        metadata={"ownerReferences": [{"kind": "StatefulSet", "uid": "x"}]},
    )
    assert cache.put("ControllerRevision", ours) == KEY
    assert cache.put("ControllerRevision", of_the_controller) is None
    assert cache.put("Pod", pod_body("chat-0")) == KEY  # pods belong by their label
    assert len(cache) == 2


FORGED = {
    "of another uid": [{"kind": "PDCluster", "name": "chat", "uid": "another"}],
    "of another name": [{"kind": "PDCluster", "name": "n" * 500_000, "uid": bodies.UID}],
    "of a uid that is none": [{"kind": "PDCluster", "name": "chat", "uid": "u" * 500_000}],
    "of very many": [
        {"kind": "PDCluster", "name": "chat", "uid": f"{number}"} for number in range(9000)
    ],
}


@pytest.mark.parametrize("has_cluster", [True, False])
@pytest.mark.parametrize("owners", FORGED.values(), ids=FORGED.keys())
def test_of_a_forged_child_no_content_stays(owners: list[dict[str, str]], has_cluster: bool):
    cache, text = Cache(), random.Random(0).randbytes(500_000).hex()
    if has_cluster:
        cache.put("PDCluster", bodies.cluster())
    forged = bodies.child("ConfigMap", "forged", data={"a": text})
    forged["metadata"] |= {"ownerReferences": owners, "annotations": {"b": text}}
    cache.put("ConfigMap", forged)
    assert sum(len(entry.compressed.content) for entry in cache._entries.values()) < 2000


def test_of_more_than_a_pdcluster_ever_has_the_identity_is_kept_by_which_it_is_deleted():
    cache, text = Cache(), "x" * 1_000_000
    cache.put("PDCluster", bodies.cluster())
    for number in range(40):
        theirs = {"kind": "PDCluster", "name": "chat", "uid": "another"}
        ours = {**theirs, "uid": bodies.UID}
        forged = bodies.child("ConfigMap", f"forged-{number}", data={"a": text})
        forged["metadata"]["ownerReferences"] = [*[theirs] * MAX_OWNERS, ours]
        cache.put("ConfigMap", forged)
    kept = list(cache.children(KEY))
    assert sum(len(json.dumps(body)) for body in kept) < MAX_BYTES + 100_000
    assert len(diff(bodies.UID, [], kept)) == len(kept) == 40
    for body in kept:
        cache.remove("ConfigMap", body)
    service = bodies.child("Service", "chat", spec={"ports": []})
    cache.put("Service", service)
    assert list(cache.children(KEY)) == [service]


def test_what_is_more_than_a_pdcluster_ever_has_does_not_keep_it_from_being_looked_at():
    cache = Cache()
    cache.put("PDCluster", bodies.cluster())
    for kind in CHILD_OF_NAME:
        cache.put(kind, bodies.child(kind, "forged", data={"a": "x" * MAX_BYTES}))
    cluster = cache.get("PDCluster", *KEY)
    assert cluster is not None
    live = Live(cluster, list(cache.children(KEY)))
    found = observe(live, discovery=DiscoveryState(managed=True), faults={})
    assert (found.workloads, found.records, found.scalers) == ([], [], [])
    assert not any(live.own(kind) for kind in CHILD_OF_NAME)
    removed = {(str(each.kind), each.verb) for each in diff(bodies.UID, [], live.children)}
    assert removed == {(kind, Verb.DELETE) for kind in CHILD_OF_NAME.keys() - {"Secret"}}


def test_of_a_forged_pod_only_what_is_read_stays():
    labels = {**pod_body("chat-0")["metadata"]["labels"], **{f"l{n}": "x" * 63 for n in range(999)}}
    kept = trim("Pod", pod_body("chat-0", metadata={"labels": labels}))
    assert set(kept["metadata"]["labels"]) <= {
        "pdcluster.io/cluster",
        "pdcluster.io/role",
        "pdcluster.io/pool",
        "pdcluster.io/revision",
        "app.kubernetes.io/component",
    }


@pytest.mark.parametrize("template", ["", "1" * 10])
def test_a_pod_is_known_to_be_of_its_workload(template: str):
    workload = WorkloadId("chat", "decode", "cpu", "0" * 10, template)
    assert workload_of(trim("Pod", worker_body(workload))) == workload


def test_a_child_of_an_earlier_cluster_of_that_name_holds_its_name_until_it_is_gone():
    cache = Cache()
    cache.put("PDCluster", bodies.cluster())
    old = bodies.child("Service", "chat", 3, owner="earlier", spec={"ports": []})
    assert cache.put("Service", old) == KEY
    (kept,) = list(cache.children(KEY))
    assert (kept["metadata"]["uid"], "spec" in kept) == (old["metadata"]["uid"], False)
    assert cache.remove("Service", old) == KEY


def test_a_child_that_came_before_its_cluster_is_to_be_read():
    cache, service = Cache(), bodies.child("Service", "chat", 3, spec={"ports": []})
    cache.put("Service", service)
    assert cache.unread(KEY) == []
    cache.put("PDCluster", bodies.cluster())
    (name,) = cache.unread(KEY)
    cache.forget(name)
    cache.put("Service", service)
    assert (cache.unread(KEY), list(cache.children(KEY))) == ([], [service])


@pytest.mark.parametrize("taken_away", [{"labels": {}}, {"ownerReferences": []}])
def test_a_child_whose_label_or_owner_is_taken_away_is_forgotten_and_its_cluster_enqueued(
    taken_away: dict[str, object],
):
    cache = Cache()
    cache.put("Service", bodies.child("Service", "chat", 1))
    assert cache.put("Service", bodies.child("Service", "chat", 2, metadata=taken_away)) == KEY
    assert list(cache.children(KEY)) == []


def test_forget_drops_whatever_version_and_an_unknown_name_is_no_error():
    cache = Cache()
    cache.put("Service", bodies.child("Service", "chat", 7))
    name = Name("Service", "default", "chat")
    assert cache.versions("Service") == {name: ObjectVersion("uid-of-chat", 7)}
    assert (cache.forget(name), cache.forget(name), cache.versions("Service")) == (KEY, None, {})


def test_of_a_pod_its_node_and_its_type_are_kept_and_no_managed_fields():
    body = pod_body(
        "chat-0",
        spec={"containers": [], "nodeName": "n1"},
        status={"phase": "Running"},
        metadata={
            "managedFields": [{}],
            "annotations": {"a": "b", GPU: "H100", GPUS_PER_REPLICA: "8"},
        },
    )
    kept = trim("Pod", body)
    assert kept["spec"] == {"nodeName": "n1"}
    assert "managedFields" not in kept["metadata"]
    assert kept["metadata"]["annotations"] == {GPU: "H100", GPUS_PER_REPLICA: "8"}
    assert kept["status"] == {"phase": "Running"}


def test_managed_fields_are_kept_where_drift_is_looked_for_and_dropped_elsewhere():
    fields = {"managedFields": [{"manager": "kubectl"}]}
    assert (
        "managedFields"
        in trim("Service", bodies.child("Service", "chat", metadata=fields))["metadata"]
    )
    assert (
        "managedFields"
        not in trim("ControllerRevision", bodies.child("ControllerRevision", "r", metadata=fields))[
            "metadata"
        ]
    )


def test_the_copy_that_kubectl_keeps_in_an_annotation_is_dropped():
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "1"}
    kept = trim("Service", bodies.child("Service", "chat", metadata={"annotations": annotations}))
    assert kept["metadata"]["annotations"] == {"mine": "1"}


def test_of_a_pdcluster_no_metadata_of_users_is_kept_but_requests_to_us():
    body = bodies.cluster(spec={"model": {}})
    body["metadata"] |= {"annotations": {VERIFY: "now", "theirs": "a"}, "labels": {"theirs": "a"}}
    kept = trim("PDCluster", body)
    assert kept == {
        **bodies.cluster(spec={"model": {}}),
        "metadata": {**bodies.cluster()["metadata"], "annotations": {VERIFY: "now"}},
    }


def test_a_spec_that_is_too_long_is_not_kept_and_refused_as_if_it_were():
    body = bodies.cluster(spec={"podTemplate": {"spec": {"a": "a" * MAX_SPEC_BYTES}}})
    kept = trim("PDCluster", body)
    assert len(json.dumps(kept)) < 1000
    faults = list[tuple[Fault, ...]]()
    for each in (body, kept):
        with pytest.raises(InvalidObjectError) as refused:
            parse_stored(each)
        faults.append(refused.value.faults)
    assert faults[0] == faults[1]


def test_each_change_of_a_pdcluster_or_its_objects_has_a_number_of_its_own():
    cache, seen = Cache(), list[int]()
    service = bodies.child("Service", "chat", 5)
    for change in (
        lambda: cache.put("PDCluster", bodies.cluster()),
        lambda: cache.put("Service", service),
        lambda: cache.put("Service", bodies.child("Service", "chat", 6)),
        lambda: cache.forget(Name("Service", bodies.NAMESPACE, "chat")),
        lambda: cache.remove("PDCluster", bodies.cluster()),
        lambda: cache.put("PDCluster", bodies.cluster(uid="another")),
    ):
        change()
        seen.append(cache.change(KEY))
    assert len(set(seen)) == len(seen)


def test_what_teaches_nothing_is_no_change():
    cache, service = Cache(), bodies.child("Service", "chat", 5)
    cache.put("Service", service)
    before, other = cache.change(KEY), bodies.cluster(uid="another")
    cache.put("Service", service)
    cache.put("PDCluster", {**other, "metadata": {**other["metadata"], "name": "other"}})
    assert cache.change(KEY) == before
