"""The revision and templates that a spec runs as, by the snapshots that there are."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.continuation import Snapshot, continued, snapshot_hashes, snapshots_of
from pdcluster_schema.labels import PAIR_HASH, ROLE_HASH, TEMPLATE_HASH
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of, template_name, templates_of
from tests.schema.object_cases import CPU, Change, at, both, minimal, vllm
from tests.schema.revision_cases import OF_ONE_ROLE, ROLLS, STAYS

CONTAINERS = "spec.roles.decode.podTemplate.spec.containers"
FLAG = at("spec.roles.decode.engine.maxSequences", 32)
OTHER_FLAG = at("spec.roles.prefill.engine.maxBatchedTokens", 512)


def cluster(*changes: Change) -> PDCluster:
    document = minimal()
    both(*changes)(document)
    return parse(document)


def place(found: PDCluster) -> tuple[str, dict[str, str]]:
    return revision_of(found.spec), dict(templates_of(found.spec))


def after(*changes: Change, before: PDCluster | None = None) -> tuple[str, dict[str, str]]:
    return place(continued(cluster(*changes), snapshots_of(before or cluster())))


def older(found: PDCluster) -> list[Snapshot]:
    """Snapshots of an operator that replaced all roles together."""
    left_out = {PAIR_HASH, ROLE_HASH}
    return [
        replace(each, hashes={k: v for k, v in each.hashes.items() if k not in left_out})
        for each in snapshots_of(found)
    ]


BASE = cluster()
REVISION = revision_of(BASE.spec)


@pytest.mark.parametrize("name", OF_ONE_ROLE)
def test_what_concerns_one_role_gives_it_another_template_within_the_revision(name: str) -> None:
    role = OF_ONE_ROLE[name]

    template = template_name(cluster(ROLLS[name]).spec, role, REVISION)
    assert after(ROLLS[name]) == (REVISION, {role: template})


@pytest.mark.parametrize("name", sorted(ROLLS.keys() - OF_ONE_ROLE))
def test_what_roles_have_in_common_makes_a_new_revision(name: str) -> None:
    assert after(ROLLS[name]) == (revision_of(cluster(ROLLS[name]).spec), {})


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS)
def test_what_makes_no_pods_keeps_all(change: Change) -> None:
    assert after(change) == (REVISION, {})


@pytest.mark.parametrize(
    "change",
    [
        at("spec.roles.decode.engine.maxModelLen", 99),
        at("spec.roles.decode.engine.transport", "tcp"),
        at("spec.roles.decode.engine.tensorParallelSize", 2),
        at(CONTAINERS, [{"name": "worker", "image": "other:1"}]),
    ],
    ids=["lengths", "transport", "ranks", "image"],
)
def test_a_fact_of_the_handshake_of_one_role_makes_a_new_revision(change: Change) -> None:
    gpus = at("spec.roles.decode.pools.0.gpu", "H100")

    assert after(gpus, change, before=cluster(gpus)) == (
        revision_of(cluster(gpus, change).spec),
        {},
    )


def test_a_flag_of_a_stock_engine_is_of_its_role_unless_both_have_to_have_it() -> None:
    eager = both(vllm(), at("spec.roles.decode.engine.args", ["--enforce-eager"]))
    fp8 = both(vllm(), at("spec.engine.args", ["--kv-cache-dtype", "fp8"]))
    before = cluster(vllm())

    assert list(after(eager, before=before)[1]) == ["decode"]
    assert after(fp8, before=before) == (revision_of(cluster(fp8).spec), {})


def test_with_all_roles_changed_nothing_is_left_to_continue() -> None:
    changed = cluster(FLAG, OTHER_FLAG)

    assert after(FLAG, OTHER_FLAG) == (revision_of(changed.spec), {})


def test_one_role_after_the_other_stays_within_the_revision() -> None:
    first = continued(cluster(FLAG), snapshots_of(BASE))
    revision, templates = after(FLAG, OTHER_FLAG, before=first)

    assert (revision, set(templates)) == (REVISION, {"prefill", "decode"})
    # nothing of it is as it was, and the name is taken
    again, none = after(before=continued(cluster(FLAG, OTHER_FLAG), snapshots_of(first)))
    assert (again != REVISION, none) == (True, {})


def test_a_change_that_is_taken_back_finds_the_old_workers_while_they_are_there() -> None:
    changed = continued(cluster(FLAG), snapshots_of(BASE))
    both_there = [*snapshots_of(BASE), *snapshots_of(changed)]

    assert place(continued(BASE, both_there)) == (REVISION, {})
    assert place(continued(BASE, snapshots_of(changed))) == (
        REVISION,
        {"decode": template_name(BASE.spec, "decode", REVISION)},
    )


def test_equal_workers_of_two_revisions_have_names_of_their_own() -> None:
    length = at("spec.roles.prefill.engine.maxModelLen", 99)
    serving = snapshots_of(continued(cluster(FLAG), snapshots_of(BASE)))
    begun = snapshots_of(cluster(length))
    again = snapshots_of(continued(cluster(length, FLAG), [*serving, *begun]))

    assert {each.workload.revision for each in again} == {revision_of(cluster(length).spec)}
    assert not {each.workload.name for each in again} & {each.workload.name for each in serving}


def test_a_cluster_of_one_role_has_no_other_to_keep() -> None:
    mixed = at("spec.roles", {"mixed": {"pools": [CPU]}})
    flag = at("spec.roles.mixed.engine", {"maxSequences": 32})

    assert after(mixed, flag, before=cluster(mixed)) == (revision_of(cluster(mixed, flag).spec), {})


def test_a_role_without_snapshots_keeps_what_runs_of_it_and_follows_what_ends() -> None:
    changed = continued(cluster(FLAG), snapshots_of(BASE))
    prefill, decode = snapshots_of(changed)

    def found(*, ends: bool) -> tuple[str, dict[str, str]]:
        return place(continued(cluster(FLAG), [prefill], {decode.workload: ends}))

    template = {"decode": decode.workload.template}
    assert found(ends=False) == found(ends=True) == (REVISION, template)
    old = snapshots_of(BASE)[1].workload
    assert place(continued(cluster(FLAG), [prefill], {old: True})) == (REVISION, template)
    assert place(continued(BASE, snapshots_of(BASE)[:1], {old: False})) == (REVISION, {})


def test_snapshots_of_an_older_operator_are_taken_over_and_replaced_together() -> None:
    unhashed = [replace(each, hashes={}) for each in snapshots_of(BASE)]

    assert place(continued(BASE, older(BASE))) == (REVISION, {})
    assert place(continued(BASE, unhashed)) == (REVISION, {})
    assert place(continued(cluster(FLAG), older(BASE))) == (
        revision_of(cluster(FLAG).spec),
        {},
    )


CHANGES = (
    FLAG,
    OTHER_FLAG,
    at("spec.roles.decode.resources.limits", {"cpu": 1}),
    at("spec.engine.blockSize", 32),
)


CLUSTERS = {
    chosen: cluster(*(CHANGES[number] for number in chosen))
    for size in range(5)
    for chosen in combinations(range(4), size)
}


@given(st.lists(st.tuples(st.sampled_from(sorted(CLUSTERS)), st.booleans()), max_size=8))
def test_a_name_never_stands_for_other_pods(steps: list[tuple[tuple[int, ...], bool]]) -> None:
    """Specs one after another; after each one, old snapshots go, or stay as in a roll out."""
    there: list[Snapshot] = []
    for chosen, is_done in steps:
        found = continued(CLUSTERS[chosen], there)
        own = snapshots_of(found)
        known = {each.workload: each.hashes[ROLE_HASH] for each in there}
        for each in own:
            assert known.get(each.workload, each.hashes[ROLE_HASH]) == each.hashes[ROLE_HASH]
        there = [*own, *(() if is_done else (each for each in there if each not in own))]
        assert place(continued(found, there)) == place(found)


def test_hashes_of_routers_are_their_own_alone() -> None:
    routed = cluster(at("spec.roles.router", {"pools": [CPU]}))

    assert set(snapshot_hashes(routed.spec, "router")) == {TEMPLATE_HASH}
    assert [each.workload.role for each in snapshots_of(routed)] == ["prefill", "decode"]
