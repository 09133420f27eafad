"""Workers that stay: under a spec that is written otherwise, an edit of routers, a new operator."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from pdcluster_operator.writes.actions import Verb
from pdcluster_schema import revision
from pdcluster_schema.labels import PAIR_HASH, ROLE_HASH, TEMPLATE_HASH
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import written_names, written_revision
from tests.operator import bodies as made
from tests.operator.differences import diff
from tests.operator.pdcluster_operator.reconcile.spec_manifests import (
    changed,
    cluster,
    live,
    workloads,
)

NOTED = {"podTemplate": {"metadata": {"annotations": {"team": "a"}}}}


def of_older_operator(spec: PDCluster) -> list[made.Body]:
    """Objects of a cluster that an operator made which knew no hash of templates."""
    children = copy.deepcopy(workloads(live([]), spec))
    for each in children:
        labels = each["metadata"]["labels"]
        hashed, *_ = [labels.pop(name, None) for name in (TEMPLATE_HASH, PAIR_HASH, ROLE_HASH)]
        each["metadata"]["name"] = each["metadata"]["name"].removesuffix(f"-{hashed}")
    return children


def templates(manifests: Iterable[made.Body]) -> dict[str, Any]:
    """Pod templates, by StatefulSet."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in manifests
        if each["kind"] == "StatefulSet"
    }


def test_another_spelling_changes_no_object() -> None:
    before = workloads(live([]), cluster(cpu=1))
    after = workloads(live(before), cluster(cpu="1"))

    assert written_revision(cluster(cpu=1).spec) != written_revision(cluster(cpu="1").spec)
    assert changed(before, after) == set()


def test_an_upgrade_of_the_operator_replaces_no_pod_and_learns_what_runs() -> None:
    before = of_older_operator(cluster(cpu="1"))
    upgraded = workloads(live(before), cluster(cpu="1"), worker_image="worker:2")

    assert templates(upgraded) == templates(before)
    actions = diff(made.UID, upgraded, live(before).children)
    assert {each.kind.name for each in actions if each.patch} == {"ControllerRevision"}
    again = workloads(live(upgraded), cluster(cpu="1000m"))
    assert templates(again) == templates(before)


def test_an_edit_of_routers_replaces_routers_alone() -> None:
    for before in (workloads(live([]), cluster()), of_older_operator(cluster())):
        known = workloads(live(before), cluster())
        after = workloads(live(known), cluster(router=NOTED))
        was, now = templates(before), templates(after)

        assert was.keys() == now.keys()
        changed = [name for name in was if was[name] != now[name]]
        assert [name.split("-")[1] for name in changed] == ["router"]
        assert now[changed[0]]["metadata"]["annotations"]["team"] == "a"
        routers = next(each for each in after if each["metadata"]["name"] == changed[0])
        assert routers["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
        # and back again
        assert templates(workloads(live(after), cluster())) == was


def test_the_snapshot_of_routers_of_before_goes_when_another_is_made() -> None:
    before = workloads(live([]), cluster())
    after = workloads(live(before), cluster(router=NOTED))
    deleted = [
        each.name
        for each in diff(made.UID, after, live(before).children)
        if each.verb is Verb.DELETE
    ]

    assert len(deleted) == 1
    assert "-router-" in deleted[0]


def test_a_real_change_is_a_new_revision() -> None:
    before = workloads(live([]), cluster())
    after = workloads(live(before), cluster(engine={"blockSize": 32}))

    assert not templates(before).keys() & templates(after).keys()


def test_a_change_of_decode_alone_makes_other_workers_of_it_and_keeps_the_rest() -> None:
    before = workloads(live([]), cluster())
    after = workloads(live(before), cluster(cpu=2))
    was, now = templates(before), templates(after)
    gone, come = was.keys() - now.keys(), now.keys() - was.keys()

    assert [name.split("-")[1] for name in (*gone, *come)] == ["decode", "decode"]
    assert all(was[name] == now[name] for name in was.keys() & now.keys())
    selector = next(
        each["spec"]["selector"]["matchLabels"]
        for each in after
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] in come
    )
    assert selector["pdcluster.io/template"] == next(iter(come)).rpartition("-")[2]
    # the old one is still found, and then the change is taken back
    assert templates(workloads(live([*before, *after]), cluster())) == was


def test_a_role_that_lost_its_snapshot_runs_on() -> None:
    changed_role = workloads(live(workloads(live([]), cluster())), cluster(cpu=2))
    kept = [
        each
        for each in changed_role
        if each["kind"] != "ControllerRevision" or "-decode-" not in each["metadata"]["name"]
    ]

    assert templates(workloads(live(kept), cluster(cpu=2))) == templates(changed_role)


def test_routers_that_lost_their_snapshot_are_made_from_the_spec() -> None:
    before = workloads(live([]), cluster())
    kept = [
        each
        for each in before
        if each["kind"] != "ControllerRevision" or "-router-" not in each["metadata"]["name"]
    ]

    assert changed(before, workloads(live(kept), cluster())) == set()
    assert templates(workloads(live(kept), cluster(router=NOTED))) != templates(before)


def test_a_size_of_a_cpu_that_was_given_on_accelerators_keeps_its_older_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spec(**changes: Any) -> PDCluster:
        given = cluster(engine={"maxSequences": 64})
        pools = [{"name": "cpu", "gpu": "B200", "replicas": 1}]
        roles = given.spec.model_dump(by_alias=True, exclude_unset=True)["roles"]
        roles["decode"]["pools"] = pools
        sections = {"model": {"name": "tiny", "path": "/m"}, "engine": {"maxSequences": 64}}
        return parse(made.cluster(spec={**sections, "roles": roles, **changes}))

    now, before = written_names(spec().spec)
    assert now != before
    with monkeypatch.context() as older:
        older.setattr(revision, "_by_device", lambda engine: {})
        children = of_older_operator(spec())
        assert written_revision(spec().spec) == before
    upgraded = workloads(live(children), spec())

    assert templates(upgraded) == templates(children)
    other = workloads(live(upgraded), spec(engine={}))
    assert not templates(upgraded).keys() & templates(other).keys()
