"""Fleets with two GPU types in each role, by engines whose steps can be worked out by hand."""

from dataclasses import replace

import pytest

from pdcluster_schema.load import parse_applied
from pdctl.sizing.manifest import PlannedModel, manifest_of
from pdctl.sizing.objective import LoadWindow, Objective, OfferedLoad
from pdctl.sizing.profile import RankLayout
from pdctl.sizing.search import SearchInput, best, placements
from pdctl.sizing.several_types import joined_placements
from tests.operator.pdctl.planned_models import FAST

SLOW = replace(
    FAST, gpu="H200", prefill={1: 0.2}, decode={10: 0.04, 20: 0.06}, mixed={(1010, 10): 0.24}
)
GIVEN = SearchInput(
    Objective(1000, 101, ttft_seconds=2.0, itl_seconds=0.07),
    {"B200": 4, "H200": 8},
    {"B200": 1e9, "H200": 5e8},
    prompt_kv_bytes=5e7,
    demand=OfferedLoad([LoadWindow(60.0, 9.0, 9.0, 9.0)]),
)


def of_kind(kind, *profiles, given=GIVEN):
    return [one for one in joined_placements(profiles, given) if one.kind == kind]


def test_two_types_hold_what_neither_holds_alone():
    # 0.1 s of a prompt and 0.2 s of an answer: 2.7 workers of B200, of which there are 2
    alone = placements([FAST, SLOW], replace(GIVEN, gpus={"B200": 4, "H200": 6}))
    assert not [one for one in alone if one.kind == "aggregated"]
    [one, *_] = best(of_kind("aggregated", FAST, SLOW), GIVEN)
    assert [(role.profile.gpu, role.workers) for role in one.roles] == [("B200", 2), ("H200", 2)]
    assert one.requests_per_second == pytest.approx(9.0)
    assert one.gpus_of == {"B200": 4, "H200": 4}
    # as slow as the slower, and a stream in the mean between both
    assert one.itl_seconds == pytest.approx(0.1 * 0.24 + 0.9 * 0.04)
    assert one.mean_itl_seconds < one.itl_seconds


def test_prefill_and_decode_have_both_types_each():
    [one, *_] = best(of_kind("split", FAST, SLOW), GIVEN)
    names = [(role.role, role.profile.gpu) for role in one.roles]
    both = ("B200", "H200")
    assert names == [("prefill", gpu) for gpu in both] + [("decode", gpu) for gpu in both]
    assert one.transfer_seconds == 0.05  # over the slower network


def test_both_have_the_same_settings_and_streams():
    other = replace(SLOW, mixed={(2020, 20): 0.24})
    assert not of_kind("aggregated", FAST, other)
    assert not of_kind("aggregated", FAST, replace(SLOW, layout=RankLayout(4)))


def test_none_without_a_load_or_a_second_type():
    assert not [*joined_placements([FAST, SLOW], replace(GIVEN, demand=None))]
    assert not [*joined_placements([FAST], replace(GIVEN, gpus={"B200": 64}))]


def test_the_objective_is_held_by_both():
    tight = replace(GIVEN, objective=replace(GIVEN.objective, itl_seconds=0.035))
    assert not of_kind("aggregated", FAST, SLOW, given=tight)


@pytest.mark.parametrize("kind", ["aggregated", "split"])
def test_a_role_of_the_manifest_has_a_pool_of_each(kind: str):
    [one, *_] = best(of_kind(kind, FAST, SLOW), GIVEN)
    document = manifest_of(PlannedModel("m", "vllm", False), one, GIVEN)
    parse_applied(document)
    roles = document["spec"]["roles"]
    assert set(roles) == ({"mixed"} if kind == "aggregated" else {"prefill", "decode"})
    for role in roles.values():
        assert [pool["gpu"] for pool in role["pools"]] == ["B200", "H200"]
        assert [pool["maxReplicas"] for pool in role["pools"]] == [2, 4]
