"""Experts over data-parallel ranks, and the KV that activations leave beside their weights."""

import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from pdcluster_schema.accelerators import accelerators
from pdctl.cli.main import app
from pdctl.sizing import tables
from pdctl.sizing.layouts import layouts_of
from pdctl.sizing.manifest import PlannedModel, manifest_of, manifest_text
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import RankLayout, prefill_budget
from pdctl.sizing.roofline import roofline_profile
from pdctl.sizing.search import SearchInput, placements
from pdctl.sizing.shape import shape_of
from tests.operator.pdctl.planned_models import FAST, LLAMA

GOAL = Objective(1000, 101, ttft_seconds=2.0, itl_seconds=0.05)
GIVEN = SearchInput(GOAL, {"B200": 8}, links={"B200": 1e9}, prompt_kv_bytes=5e7)
MIXTRAL = shape_of(LLAMA | {"num_local_experts": 64, "num_experts_per_tok": 2}, "m")


def test_experts_lie_over_all_ranks_in_tensor_or_in_expert_parallel():
    found = layouts_of(MIXTRAL, 4)
    sizes = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    assert set(found) == {RankLayout(1)} | {
        RankLayout(*size, each) for size in sizes for each in (False, True)
    }
    assert len(found) == len(set(found))


def test_ranks_without_experts_to_share_are_workers():
    assert layouts_of(shape_of(LLAMA, "m"), 4) == [RankLayout(1), RankLayout(2), RankLayout(4)]


def test_a_worker_of_one_engine_has_no_data_parallel_ranks():
    assert {each.data for each in layouts_of(MIXTRAL, 8, with_data=False)} == {1}


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_a_plan_of_data_parallel_ranks_renders_as_vllm_has_it(tmp_path, is_expert_parallel):
    profile = replace(FAST, layout=RankLayout(2, 4, is_expert_parallel))
    [one] = [one for one in placements([profile], GIVEN) if one.kind == "aggregated"]
    out = tmp_path / "plan.yaml"
    out.write_text(manifest_text(manifest_of(PlannedModel("m", "vllm", False), one, GIVEN), ""))
    done = CliRunner().invoke(app, ["render", str(out)])
    assert done.exit_code == 0, done.output
    assert "--tensor-parallel-size" in done.output
    assert "--data-parallel-size" in done.output
    assert "nvidia.com/gpu: '8'" in done.output or 'nvidia.com/gpu: "8"' in done.output
    assert ("--enable-expert-parallel" in done.output) is is_expert_parallel


def test_what_data_parallel_ranks_do_not_share_lies_on_each():
    b200 = accelerators()["B200"]
    profile = roofline_profile("B200", b200, RankLayout(1, 8), MIXTRAL, GOAL)
    shared = 2 * (LLAMA["vocab_size"] * 4096 * 2 + 32 * 2 * 4096 * 128 * 40)
    experts = 2 * 64 * 32 * 3 * 4096 * LLAMA["intermediate_size"]
    of_token = 2 * 2 * 32 * 8 * 128
    free = tables.MEMORY_SHARE * (b200.memory_bytes or 0) - shared - experts / 8
    assert profile is not None
    assert profile.least_kv_tokens == pytest.approx(free / of_token, rel=1e-3)


def test_activations_take_memory_by_the_tokens_of_a_step(monkeypatch):
    """100 tokens of KV for each that a step has fewer than 9000."""
    taken = []

    def estimate(target, modes, budget):
        taken.append(budget)
        if budget >= 9000:
            raise ValueError("no KV budget: non-KV memory meets/exceeds")
        return {
            "total_kv_size_tokens": 100 * (9000 - budget),
            "kv_size_per_token_bytes": 8.0,
        }

    found = tables.SiliconTables("m", "vllm")
    monkeypatch.setattr(found, "_kv_estimate", estimate)
    found.shape = MIXTRAL
    target = tables._Target("B200", RankLayout(1, 8), GOAL)
    kv_tokens = found._kv_tokens(target, {})
    assert kv_tokens == {each: 100 * (9000 - each) for each in (512, 1024, 2048, 4096, 8192)}
    assert taken[-1] == 16384
    many = replace(target, objective=replace(GOAL, input_tokens=700_000))
    assert max(found._kv_tokens(many, {})) == 1024
    with pytest.raises(ValueError, match="no KV budget for one request"):
        found._kv_tokens(replace(target, objective=replace(GOAL, input_tokens=900_000)), {})


def test_a_placement_has_the_kv_that_its_own_budget_leaves():
    few = replace(FAST, kv_tokens={2048: 20_000}, mixed={(4096, 10): 0.2, (2048, 10): 0.1})
    found = placements([few], GIVEN)
    assert {one.roles[0].max_batched_tokens for one in found if one.kind == "aggregated"} == {2048}
    assert {one.roles[1].batch for one in found if one.kind == "split"} == {10}
    many = replace(few, prefill={1: 0.1, 4: 0.3}, kv_tokens={2048: 20_000, math.inf: 3000})
    [batch] = {one.roles[0].batch for one in placements([many], GIVEN) if one.kind == "split"}
    assert (batch, prefill_budget(4, 1000)) == (1, 4096)
