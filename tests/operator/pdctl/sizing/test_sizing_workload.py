"""Traces in place of one request's lengths: what a plan takes from them, by hand."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdctl.sizing.manifest import PlannedModel, manifest_of
from pdctl.sizing.objective import (
    LengthDistribution,
    LoadWindow,
    Objective,
    OfferedLoad,
    Prompt,
    at_percentile,
    binned,
)
from pdctl.sizing.profile import PromptScatter, prompt_scatter
from pdctl.sizing.search import SearchInput, best, placements
from pdctl.sizing.waiting import wait_seconds
from pdctl.sizing.workload import cached_tokens, read_workload
from tests.operator.pdctl.planned_models import FAST

HEADER = "seconds,requests_per_second,input_tokens,output_tokens\n"
GOAL = Objective(1000, 101, ttft_seconds=2.0, itl_seconds=0.05)
# Prompts have their peak in the first minute, answers theirs in the second.
LOAD = OfferedLoad([LoadWindow(60.0, 10.0, 20.0, 2.0), LoadWindow(60.0, 10.0, 2.0, 12.0)])
GIVEN = SearchInput(GOAL, {"B200": 12}, {"B200": 1e9}, prompt_kv_bytes=5e7, demand=LOAD)


def requests(folder: Path, *rows: tuple[float, int, int]) -> Path:
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_rates_of_a_csv_give_means_windows_and_the_streams_that_run(tmp_path: Path):
    path = tmp_path / "load.csv"
    path.write_text(HEADER + "0,2,1000,50\n60,4,500,100\n")
    found = read_workload(path, 512)
    assert (found.num_requests, found.seconds, found.window_seconds) == (360, 120.0, 60.0)
    assert found.input_tokens == pytest.approx(2000 / 3)
    assert found.output_tokens == pytest.approx(250 / 3)
    # answers of 100 tokens run twice as long, and there are twice as many of them
    assert found.lengths.stream == (600, 90)
    assert (found.lengths.longest, found.lengths.short) == (1050, 500)
    assert (found.percentile(0, 50.0), found.percentile(0, 90.0)) == (500, 1000)
    assert found.shared_ratio() == 0.0
    windows = found.demand(100.0).windows
    assert [each.requests for each in windows] == [2.0, 4.0]
    assert [each.prompts for each in windows] == pytest.approx([3.0, 3.0])
    assert [each.answers for each in windows] == pytest.approx([1.2, 4.8])


def test_rows_of_less_than_a_minute_are_joined(tmp_path: Path):
    path = tmp_path / "load.csv"
    path.write_text(HEADER + "".join(f"{20 * n},{n % 3},100,10\n" for n in range(6)))
    windows = read_workload(path, 512).demand(100.0).windows
    assert [(each.seconds, each.requests) for each in windows] == [(60.0, 1.0), (60.0, 1.0)]


def test_requests_are_counted_in_windows_to_the_last_one(tmp_path: Path):
    path = requests(tmp_path, (0, 100, 10), (60_000, 300, 10), (119_000, 200, 10), (120_000, 1, 9))
    found = read_workload(path, 512)
    assert [each.requests for each in found.demand(100.0).windows] == [1 / 60, 3 / 60]
    assert [each.tokens for each in found.lengths.prompts(10**6)] == [1, 100, 200, 300]
    assert found.lengths.longest == 310


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "one.jsonl",
            '{"timestamp": 5, "input_length": 4, "output_length": 2}\n',
            "timestamp: has all requests at one time, so it has no rate; give requests over a",
        ),
        ("none.csv", HEADER + "0,0,1,1\n60,0,1,1\n", "has no request; raise requests_per_second"),
        ("empty.csv", "", "is empty; write the line seconds,"),
        ("empty.jsonl", "", "holds no request; write a line of JSON for each request"),
    ],
)
def test_a_trace_without_a_rate_is_refused(tmp_path: Path, name: str, text: str, sentence: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidTraceError, match=sentence):
        read_workload(tmp_path / name, 512)


def test_prefixes_are_cached_while_the_last_blocks_used_hold_them():
    rows = [TraceRequest(0.0, 40, 5, 0, ids) for ids in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (2, 1))]
    trace = LoadTrace([*rows[:3], replace(rows[3], input_tokens=32)], 16)
    # one token at least is computed, and blocks after another start are other blocks
    assert [*cached_tokens(trace, float("inf"))] == [0, 32, 39, 0]
    assert [*cached_tokens(trace, 64)] == [0, 32, 39, 0]
    assert [*cached_tokens(trace, 48)] == [0, 32, 32, 0]
    assert [*cached_tokens(trace, 16)] == [0, 16, 16, 0]


def test_a_plan_counts_what_half_of_a_worker_keeps(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 32, "output_length": 2, "hash_ids": [1, 2]}
    lines = [row, {**row, "timestamp": 60_000, "hash_ids": [1, 3]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_workload(path, 16)
    assert found.shared_ratio() == 0.25
    assert [each.computed for each in found.lengths.prompts(1000)] == [16, 32]
    assert [each.computed for each in found.lengths.prompts(30)] == [32]


def test_bins_keep_the_mean_and_percentiles_are_of_the_weights():
    prompts = [Prompt(tokens, 0.0, 0.001) for tokens in range(1000)]
    bins = binned(prompts)
    assert len(bins) == 16
    assert sum(each.tokens * each.share for each in bins) == pytest.approx(499.5)
    assert at_percentile([(1, 9.0), (2, 1.0)], 90.0) == 1
    assert at_percentile([(1, 9.0), (2, 1.0)], 90.1) == 2
    assert LOAD.at(lambda window: window.prompts) == 20.0
    assert replace(LOAD, percentile=50.0).at(lambda window: window.prompts) == 2.0


def test_prompts_that_scatter_take_more_than_the_mean_one():
    pair, walks = [Prompt(100, 0.0, 0.5), Prompt(300, 0.0, 0.5)], []
    lengths = LengthDistribution(lambda kv: walks.append(kv) or pair, (200, 100), 400, 100)
    goal = replace(GOAL, percentile=90.0, lengths=lengths)
    found = prompt_scatter(goal, 1000, lambda tokens, cached: tokens**2 / 1e4)
    assert walks == [1000]
    # seconds 1 and 9, mean 5, and 4 for the mean prompt
    assert found == PromptScatter(0.0, 1.0, 100.0, 4.0, 16 / 25)
    mean = prompt_scatter(replace(goal, percentile=None), 1000, lambda tokens, cached: tokens / 1e2)
    assert mean == PromptScatter(0.0, 0.0, 0.0, 0.0, 1 / 4)
    assert prompt_scatter(GOAL, 1000, lambda tokens, cached: 2.0) == PromptScatter()


def test_ttft_is_that_of_the_long_prompt():
    def ttft(kind: str, scatter: PromptScatter) -> float:
        given = replace(GIVEN, demand=None)
        found = placements([replace(FAST, scatter=scatter)], given)
        return max(one.ttft_seconds for one in found if one.kind == kind)

    long = PromptScatter(long_tokens=1000.0, long_seconds=0.15)
    # a second chunk of 0.12 s, and 0.05 s that its attention takes beyond twice the mean prompt
    assert ttft("aggregated", long) - ttft("aggregated", PromptScatter()) == pytest.approx(0.17)
    assert ttft("split", long) - ttft("split", PromptScatter()) == pytest.approx(0.15)


def test_an_aggregated_fleet_holds_each_window_with_the_fewest_workers():
    [one] = [one for one in placements([FAST], GIVEN) if one.kind == "aggregated"]
    # 0.1 s of each prompt and 0.2 s of each answer: 2.4 workers, then 2.6
    assert one.roles[0].workers == 3
    assert one.utilization == pytest.approx(0.12 * 20 / 3)
    assert one.requests_per_second == 10.0
    smaller = replace(GIVEN, gpus={"B200": 5})
    assert not [one for one in placements([FAST], smaller) if one.kind == "aggregated"]


def test_each_role_of_a_split_holds_its_own_peak():
    [one, *_] = best(placements([FAST], GIVEN), GIVEN, "split")
    # 9.5 prompts a second at most of a prefill worker, 6.67 answers of a decode worker
    assert [role.workers for role in one.roles] == [3, 2]
    assert one.utilization == pytest.approx(20 * 0.1 / 3)
    assert one.ttft_seconds == pytest.approx(0.1 + 0.025 + wait_seconds(0.1, 3, 2 / 3, None))
    most = replace(GIVEN, demand=replace(LOAD, percentile=50.0))
    [one, *_] = best(placements([FAST], most), most, "split")
    assert [role.workers for role in one.roles] == [1, 1]
    assert not [
        one for one in placements([FAST], replace(GIVEN, gpus={"B200": 8})) if one.kind == "split"
    ]


def test_workers_are_added_until_the_wait_is_within_ttft():
    goal = replace(GOAL, ttft_seconds=0.28, percentile=90.0)
    tight = replace(GIVEN, objective=goal, gpus={"B200": 40})
    fast = replace(FAST, decode={10: 0.012, 20: 0.02})
    [one] = [one for one in placements([fast], tight) if one.kind == "aggregated"]
    assert one.roles[0].workers > 3
    assert one.ttft_seconds <= 0.28
    # a request stays in the queue of the worker that it was sent to
    assert wait_seconds(0.12, 1, 2.4 / (one.roles[0].workers - 1), 90.0) > 0.16


def test_a_manifest_has_the_longest_request_and_the_short_prompts_stay():
    lengths = LengthDistribution(lambda kv_tokens: [Prompt(1000)], (1000, 101), 9000, 130)
    given = replace(GIVEN, objective=replace(GOAL, itl_seconds=1.0, lengths=lengths))
    profile = replace(FAST, mixed={(8010, 10): 0.5, (8020, 20): 0.5})
    [one, *_] = best(placements([profile], given), given, "split")
    small = replace(
        one,
        roles=tuple(
            replace(r, profile=replace(profile, kv_tokens={math.inf: 500})) for r in one.roles
        ),
    )
    spec = manifest_of(PlannedModel("m", "vllm", False, 131072), small, given)["spec"]
    assert spec["engine"]["maxModelLen"] == 9000
    assert spec["routing"]["offload"]["prefillLengthThreshold"] == 129


@pytest.mark.parametrize("utilization", [0.5, 0.8])
def test_waits_of_unequal_prompts_are_those_of_a_simulated_queue(utilization: float):
    draw, wait, waits = random.Random(7), 0.0, []
    for _ in range(300_000):  # Lindley's recursion, M/G/1: 0.5 s or 3 s, mean 1 and variance 1
        waits.append(wait)
        service = 3.0 if draw.random() < 0.2 else 0.5
        wait = max(0.0, wait + service - draw.expovariate(utilization))
    waits.sort()
    mean = sum(waits) / len(waits)
    assert wait_seconds(1.0, 1, utilization, None, 1.0) == pytest.approx(mean, rel=0.1)
    for percentile in (90.0, 99.0):
        simulated = waits[int(len(waits) * percentile / 100.0)]
        assert wait_seconds(1.0, 1, utilization, percentile, 1.0) == pytest.approx(
            simulated, rel=0.25
        )
