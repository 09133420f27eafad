"""The search over engines whose steps can be worked out by hand, and the waits it adds."""

import math
import random
from dataclasses import replace

import pytest

from pdctl.sizing.manifest import PlannedModel, break_even_tokens, manifest_of
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import RankLayout
from pdctl.sizing.search import PlannedRole, SearchInput, best, front, placements
from pdctl.sizing.shape import shape_of
from pdctl.sizing.waiting import MAX_UTILIZATION, max_utilization, wait_seconds
from tests.operator.pdctl.planned_models import FAST

GOAL = Objective(1000, 101, ttft_seconds=2.0, itl_seconds=0.05)
WIDE = replace(FAST, gpu="B300", layout=RankLayout(1), prefill={1: 0.4}, mixed={})
GIVEN = SearchInput(
    GOAL, {"B200": 8, "B300": 4}, links={"B200": 1e9, "B300": 2e9}, prompt_kv_bytes=5e7
)


def test_no_wait_where_fewer_wait_than_the_percentile_leaves_out():
    assert wait_seconds(1.0, 256, 0.1, 99.0) == 0.0
    assert wait_seconds(1.0, 8, 0.0, 90.0) == 0.0


@pytest.mark.parametrize(
    ("model_length", "written"),
    [(0, None), (4096, 4096), (131072, 100_000), (500, 1101)],
)
def test_manifest_has_no_longer_requests_than_the_kv_of_both_roles(model_length, written):
    one = _splits(GIVEN, FAST, WIDE)[0]
    spec = manifest_of(PlannedModel("m", "vllm", False, model_length), one, GIVEN)["spec"]
    assert spec["engine"].get("maxModelLen") == written


def _splits(given, *profiles):
    return [one for one in placements(profiles, given) if one.kind == "split"]


def test_an_aggregated_worker_decodes_in_each_step_and_computes_a_chunk_in_some():
    [one] = [one for one in placements([FAST], GIVEN) if one.kind == "aggregated"]
    # 10 streams end a request in 100 steps: 10 chunks of 1000 tokens in 100 steps
    mean = 0.1 * 0.12 + 0.9 * 0.02
    assert one.gpus == 8
    assert one.mean_itl_seconds == pytest.approx(mean)
    assert one.requests_per_second == pytest.approx(MAX_UTILIZATION * 4 * 10 / (100 * mean))
    assert one.tokens_per_second == pytest.approx(101 * one.requests_per_second)
    assert one.utilization == pytest.approx(0.1 * 0.12 / mean)
    assert one.ttft_seconds > 0.12


def test_percentile_of_an_aggregated_step_is_the_mixed_one_unless_mixed_steps_are_rarer():
    def itl(percentile):
        given = replace(GIVEN, objective=replace(GOAL, percentile=percentile))
        [one] = [one for one in placements([FAST], given) if one.kind == "aggregated"]
        return one.itl_seconds

    assert itl(85.0) == 0.02
    assert itl(95.0) == 0.12


def test_a_split_matches_decode_to_prefill_and_counts_the_transfer():
    found = max(_splits(GIVEN, FAST, WIDE), key=lambda one: one.tokens_per_second)
    prefill, decode = found.roles
    assert (prefill.profile.gpu, decode.profile.gpu) == ("B200", "B300")
    assert found.transfer_seconds == 0.05  # the narrower worker has one GPU, the slower link 1e9
    assert {one.transfer_seconds for one in _splits(GIVEN, WIDE)} == {0.025}
    # four workers of 20 streams, 100 steps of 0.03 s: 6.67 requests a second each at most
    assert found.requests_per_second == pytest.approx(MAX_UTILIZATION * 4 * 20 / (100 * 0.03))
    assert found.requests_per_second < 4 * MAX_UTILIZATION / 0.1


def test_a_prompt_of_a_data_parallel_worker_has_the_links_of_its_own_rank():
    ranks = replace(FAST, layout=RankLayout(1, 2))
    assert {one.transfer_seconds for one in _splits(GIVEN, ranks)} == {0.05}
    assert {one.transfer_seconds for one in _splits(GIVEN, FAST)} == {0.025}


def test_a_split_sends_its_own_prompts_to_prefill():
    [one, *_] = _splits(GIVEN, replace(FAST, mixed={(8010, 10): 0.5, (8020, 20): 0.5}))
    slack = replace(GIVEN, objective=replace(GOAL, itl_seconds=1.0))
    spec = manifest_of(PlannedModel("m", "vllm", False), one, slack)["spec"]
    assert spec["routing"]["offload"]["prefillLengthThreshold"] == 999


def test_an_objective_beyond_the_buckets_is_of_the_mean():
    long = replace(GIVEN, objective=replace(GOAL, ttft_seconds=60.0, percentile=99.9))
    [one, *_] = _splits(GIVEN, FAST)
    objective = manifest_of(PlannedModel("m", "vllm", False), one, long)["spec"]["autoscale"][
        "objective"
    ]
    assert objective == {
        "ttft": {"seconds": 60.0},
        "itl": {"seconds": 0.05, "percentile": 99},
    }


@pytest.mark.parametrize(
    ("quantization", "bytes_of_weight", "is_weight_only"),
    [
        ({"quant_method": "awq", "bits": 4}, 0.53, True),
        ({"quant_method": "gptq", "bits": 8}, 1.0, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
                },
            },
            1.0,
            False,
        ),
        ({"quant_method": "fp8"}, 1.0, False),
        ({"quant_method": "of tomorrow"}, 2.0, True),
    ],
)
def test_weights_have_the_bits_of_their_quantization(quantization, bytes_of_weight, is_weight_only):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    shape = shape_of(config | {"quantization_config": quantization}, "m")
    assert shape.weight_bytes == pytest.approx(bytes_of_weight)
    assert shape.is_weight_only == is_weight_only


def test_prefill_and_decode_share_the_gpus_of_one_type():
    found = _splits(GIVEN, FAST)
    assert found
    assert all(one.gpus <= 8 for one in found)


def test_streams_that_the_cache_does_not_hold_are_left_out():
    small = replace(FAST, kv_tokens={math.inf: 15_000})
    assert {one.roles[1].batch for one in _splits(GIVEN, small)} == {10}
    at_p99 = replace(GIVEN, objective=replace(GOAL, percentile=99.0))
    assert not _splits(at_p99, small)


def test_a_price_changes_what_is_best():
    def best_decode(prices):
        return best(
            _splits(replace(GIVEN, prices=prices), FAST, WIDE), replace(GIVEN, prices=prices)
        )[0]

    dear_b200 = best_decode({"B200": 50.0, "B300": 1.0}).gpus_of
    dear_b300 = best_decode({"B200": 1.0, "B300": 50.0}).gpus_of
    assert dear_b200.get("B200", 0) < dear_b300["B200"]
    assert "B300" not in dear_b300


def test_the_front_rises_as_streams_slow_down_and_the_best_is_within_the_objective():
    given = replace(GIVEN, objective=replace(GOAL, itl_seconds=0.025))
    found = placements([FAST, WIDE], given)
    points = front(found, "split")
    assert [one.per_user for one in points] == sorted(one.per_user for one in points)
    assert [one.per_gpu for one in points] == sorted((one.per_gpu for one in points), reverse=True)
    assert {one.roles[-1].batch for one in best(found, given, "split")} == {10}


def test_break_even_is_where_a_chunk_brings_a_step_to_the_objective():
    role = PlannedRole("decode", FAST, 1, 10, 2048)
    # 0.02 s alone and 0.12 s with 1000 tokens: 0.05 s with 300, in steps of 64
    assert break_even_tokens(role, 0.05) == 256
    assert break_even_tokens(role, 0.01) == 64


@pytest.mark.parametrize("utilization", [0.5, 0.8, 0.9])
def test_waits_are_those_of_a_simulated_queue(utilization):
    draw, wait, waits = random.Random(7), 0.0, []
    for _ in range(400_000):  # Lindley's recursion, M/D/1
        waits.append(wait)
        wait = max(0.0, wait + 1.0 - draw.expovariate(utilization))
    waits.sort()
    mean = sum(waits) / len(waits)
    assert wait_seconds(1.0, 1, utilization, None) == pytest.approx(mean, rel=0.1)
    for percentile in (90.0, 99.0):
        simulated = waits[int(len(waits) * percentile / 100.0)]
        assert 0.95 * simulated < wait_seconds(1.0, 1, utilization, percentile) < 1.25 * simulated


def test_the_greatest_utilization_keeps_the_limit():
    used = max_utilization(1.0, 4, 0.3, 90.0)
    assert wait_seconds(1.0, 4, used, 90.0) <= 0.3 < wait_seconds(1.0, 4, used + 0.01, 90.0)
    assert max_utilization(1.0, 4, -0.1, None) == 0.0
    assert max_utilization(1.0, 4, 1e6, None) == MAX_UTILIZATION
