"""An undo after a roll out has ended, on simulated clusters: by each strategy, and refused."""

import json
from copy import deepcopy
from typing import Any

import pytest

from pdcluster_api.plan.history import read_history
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import at_revision, revision_of, template_name
from tests.operator.pdcluster_api.plan.clusters import condition_of
from tests.operator.pdcluster_api.plan.rollout.gated_cluster import GatedCluster, gated
from tests.operator.pdcluster_api.plan.simulated import assert_as_declared, assert_at_rest

GATES: dict[str, Any] = {"on_failure": "Pause", "bake_seconds": 20}
WAYS = [
    {"strategy": "Rolling"},
    {"strategy": "Rolling", **GATES},
    {"strategy": "BlueGreen"},
    {"strategy": "Recreate"},
]
A, B, C = (revision_of(gated(engine).spec) for engine in (64, 65, 66))
WHOLE = {"prefill": 2, "decode": 2}


def applied(existing: GatedCluster, cluster: PDCluster) -> None:
    existing.generation += 1
    existing.walk(cluster)


def rolled_out(way: dict[str, Any], *engines: int) -> GatedCluster:
    """After roll outs of 64, and of these engines, have ended."""
    existing = GatedCluster()
    for engine in (64, *engines):
        applied(existing, gated(engine, **way))
        assert_as_declared(existing, gated(engine, **way))
    return existing


def undo(existing: GatedCluster) -> None:
    existing.command = f"undo {existing.generation}"


def retired(existing: GatedCluster) -> set[tuple[str, str]]:
    return {(each.revision, each.role) for each in existing.retired}


def served(existing: GatedCluster) -> list[str]:
    return [str(each.revision) for each in read_history(existing.status)]


@pytest.mark.parametrize("way", WAYS)
def test_snapshots_of_the_revision_before_stay_without_workers_and_nothing_is_written(
    way: dict[str, Any],
):
    existing = rolled_out(way, 65)

    assert served(existing) == [B, A]
    assert retired(existing) == {(A, "prefill"), (A, "decode")}
    assert existing.sizes(A) == {}
    assert_at_rest(existing, gated(65, **way))

    applied(existing, gated(66, **way))
    assert served(existing) == [C, B]
    assert retired(existing) == {(B, "prefill"), (B, "decode")}
    assert existing.records == {*existing.sets, *existing.retired}


@pytest.mark.parametrize("way", WAYS)
def test_an_undo_after_the_end_goes_back_by_the_strategy_and_the_spec_stays(way: dict[str, Any]):
    existing, new = rolled_out(way, 65), gated(65, **way)
    undo(existing)

    plans = existing.walk(new)

    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {})
    assert (existing.service, existing.is_wide) == (A, False)
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    assert existing.condition("Ready") == ("False", words.ROLLED_BACK)
    assert existing.condition("Serving")[0] == "True"
    assert served(existing) == [A, B]
    assert retired(existing) == {(B, "prefill"), (B, "decode")}
    assert_at_rest(existing, new)
    least = min(sum(each.replicas for each in plan.workloads) for plan in plans)
    most = max(sum(each.replicas for each in plan.workloads) for plan in plans)
    bounds = {"Rolling": (4, 6), "BlueGreen": (4, 8), "Recreate": (0, 4)}
    assert (least, most) == bounds[way["strategy"]]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_undone_is_not_tried_again_until_the_spec_changes_or_a_user_asks(
    way: dict[str, Any],
):
    existing, new = rolled_out(way, 65), gated(65, **way)
    undo(existing)
    existing.walk(new)
    resumed, back = deepcopy(existing), deepcopy(existing)

    applied(existing, gated(65, **{**way, "progress_deadline_seconds": 600}))
    assert existing.sizes(A) == WHOLE
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    applied(existing, gated(66, **way))
    assert_as_declared(existing, gated(66, **way))
    assert served(existing) == [C, A]

    resumed.command = f"resume {resumed.status['gate']['since']}"
    resumed.walk(new)
    assert_as_declared(resumed, new)
    assert served(resumed) == [B, A]
    undo(resumed)
    resumed.walk(new)
    assert resumed.sizes(A) == WHOLE

    plans = len(back.pods)
    applied(back, gated(64, **way))
    assert_as_declared(back, gated(64, **way))
    assert back.condition(words.ROLLED_BACK) == ("", "")
    assert len(back.pods) == plans
    undo(back)
    back.walk(gated(64, **way))
    assert back.sizes(B) == WHOLE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed_at", range(0, 24, 2))
def test_an_operator_that_is_killed_in_any_step_of_an_undo_ends_it(
    way: dict[str, Any], killed_at: int
):
    existing, new = rolled_out(way, 65), gated(65, **way)
    undo(existing)
    for _ in range(killed_at):
        existing.round(new)
    existing.round(new, crash=True)
    existing.ended = {}  # its memory

    existing.walk(new)

    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {})
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    assert_at_rest(existing, new)


@pytest.mark.parametrize("way", WAYS)
def test_a_role_that_changed_alone_comes_back_alone(way: dict[str, Any]):
    existing, changed = rolled_out(way), gated(of_role={"decode": 32}, **way)
    template = template_name(changed.spec, "decode", A)
    new = at_revision(changed, A, {"decode": template})
    applied(existing, new)
    assert existing.sizes(A, template) == {"decode": 2}
    assert {each.template for each in existing.retired} == {""}
    assert_at_rest(existing, new)
    undo(existing)

    plans = existing.walk(new)

    assert existing.sizes(A) == WHOLE
    assert existing.sizes(A, template) == {}
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    assert {each.template for each in existing.retired} == {template}
    prefill = [
        {each.replicas for each in plan.workloads if each.id.role == "prefill"} for plan in plans
    ]
    assert all(each == {2} for each in prefill)


@pytest.mark.parametrize("way", WAYS)
def test_without_history_an_undo_says_why_and_changes_nothing(way: dict[str, Any]):
    existing, first = rolled_out(way), gated(64, **way)
    undo(existing)

    plans = existing.walk(first)

    assert_as_declared(existing, first)
    assert existing.condition("Ready") == ("True", words.AS_DECLARED)
    found = condition_of(existing.status, words.ROLLED_BACK)
    assert (found["status"], found["reason"]) == ("False", words.NO_HISTORY)
    assert f"no other revision than {A} has served with all its workers" in found["message"]
    events = [event.reason for plan in plans for event in plan.events]
    assert events.count(words.NO_HISTORY) == 1
    assert_at_rest(existing, first)
    existing.command = ""
    existing.walk(first)
    assert existing.condition(words.ROLLED_BACK) == ("", "")


def test_snapshots_that_are_gone_or_lack_a_pool_are_named():
    existing, new = rolled_out(WAYS[0], 65), gated(65)
    lost, added = deepcopy(existing), deepcopy(existing)
    lost.records -= lost.retired
    lost.retired = set()
    undo(lost)
    lost.walk(new)
    text = f"the snapshots of revision {A} are gone; apply the previous file"
    assert text in condition_of(lost.status, words.ROLLED_BACK)["message"]

    decode = new.spec.roles.decode
    assert decode is not None
    more = decode.pools[0].model_copy(update={"name": "more", "replicas": 1})
    role = decode.model_copy(update={"pools": (*decode.pools, more)})
    roles = new.spec.roles.model_copy(update={"decode": role})
    with_more = new.model_copy(update={"spec": new.spec.model_copy(update={"roles": roles})})
    applied(added, with_more)
    undo(added)
    added.walk(with_more)
    text = f"revision {A} has no snapshot of decode pool more"
    assert text in condition_of(added.status, words.ROLLED_BACK)["message"]
    assert_as_declared(added, with_more)


def test_snapshots_of_pools_and_roles_that_are_removed_go():
    """Both of what runs and of the revision before it."""

    def cluster(engine: int, *names: str) -> PDCluster:
        found = gated(engine)
        decode = found.spec.roles.decode
        assert decode is not None
        pools = tuple(decode.pools[0].model_copy(update={"name": each}) for each in names)
        role = decode.model_copy(update={"pools": pools})
        roles = found.spec.roles.model_copy(update={"decode": role})
        return found.model_copy(update={"spec": found.spec.model_copy(update={"roles": roles})})

    existing = GatedCluster()
    for engine in (64, 65):
        applied(existing, cluster(engine, "cpu", "more"))
    assert {each.pool for each in existing.retired} == {"cpu", "more"}

    applied(existing, cluster(65, "cpu"))

    assert {each.pool for each in existing.records} == {"cpu"}
    assert_at_rest(existing, cluster(65, "cpu"))
    undo(existing)
    existing.walk(cluster(65, "cpu"))
    assert existing.sizes(A) == WHOLE


@pytest.mark.parametrize("way", WAYS[2:])
@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_an_undo_in_the_middle_goes_back_without_steps_too(way: dict[str, Any], rounds: int):
    existing, new = rolled_out(way), gated(65, **way)
    existing.broken.add(B)
    existing.generation += 1
    for _ in range(rounds):
        existing.round(new)
    undo(existing)

    existing.walk(new)

    assert (existing.sizes(A), existing.sizes(B)) == (WHOLE, {})
    assert existing.condition(words.ROLLED_BACK) == ("True", words.UNDONE)
    assert served(existing) == [A]
    assert existing.retired == set()


@pytest.mark.parametrize("way", WAYS)
def test_a_revision_that_never_had_all_its_workers_is_none_to_go_back_to(way: dict[str, Any]):
    existing = GatedCluster(broken={A})
    applied(existing, gated(64, **way))
    applied(existing, gated(65, **way))
    assert_as_declared(existing, gated(65, **way))
    assert served(existing) == [B]
    assert existing.retired == set()


@pytest.mark.parametrize(
    "written",
    ["none", [{"revision": 1, "since": "x"}], [{"revision": A}], [{"revision": A, "since": 3}]],
)
def test_a_history_that_cannot_be_read_counts_as_none(written: object):
    assert read_history({"history": written}) == ()


def test_a_spec_that_changes_while_an_undo_is_under_way_goes_forward():
    for way in WAYS:
        for rounds in (1, 4, 8):
            existing, new = rolled_out(way, 65), gated(65, **way)
            undo(existing)
            for _ in range(rounds):
                existing.round(new)
            for engine in (66, 64):
                found = deepcopy(existing)
                applied(found, gated(engine, **way))
                assert_as_declared(found, gated(engine, **way))
                assert_at_rest(found, gated(engine, **way))
                assert json.dumps(found.status)
