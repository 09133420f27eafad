"""Autotune's trials on targets that a test made; and what it prints."""

import asyncio
import math
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from pdcluster_api.errors import StartError
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.bench import autotune as autotune_module
from pdctl.bench.autotune import (
    Tuning,
    autotune,
    engine_values,
    result_of,
    result_text,
    start_sizes,
    trial_rows,
)
from pdctl.bench.datasets import Lengths
from pdctl.bench.load import BenchRequest, LoadResult, OnChunk, RequestResult, TokenUsage
from pdctl.bench.measure import LocalCluster
from pdctl.bench.tuning import (
    CompletedTrial,
    LatencyTargets,
    SearchResult,
    Sizes,
    Trial,
    TrialResult,
)

LIMITS = LatencyTargets(60_000.0, 60_000.0)
TUNING = Tuning(LocalCluster(Path("f"), Path("m")), LIMITS, Lengths(4, 2), 2, 500.0, 3, 600, "0")
TRIED = CompletedTrial(Trial(Sizes(512, 64), 1.5), TrialResult(900.0, 80.0))


def ignore() -> None:
    pass


class Echo:
    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        for _ in range(ask.num_output_tokens):
            await asyncio.sleep(0)
            on_chunk()
        return TokenUsage(ask.num_output_tokens)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """The sizes that were started; those with a budget of 32 and those of sarathi do not start."""
    found: list[Sizes] = []

    async def start(tuning: Tuning, sizes: Sizes, stack: AsyncExitStack) -> Echo:
        found.append(sizes)
        if sizes.max_batched_tokens == 32 or sizes.scheduler == "sarathi":
            raise StartError("no room", exit_code=1)
        return Echo()

    monkeypatch.setattr(autotune_module, "_start", start)
    return found


async def test_a_cluster_is_started_once_for_trials_of_the_same_sizes(started: list[Sizes]) -> None:
    lines: list[str] = []
    num_answers = [0]

    def count() -> None:
        num_answers[0] += 1

    found = await autotune(TUNING, Sizes(256, 64), lines.append, count)

    assert num_answers == [3 * TUNING.num_prompts]
    assert started == [Sizes(256, 64)]
    assert [one.trial.rate for one in found.tried] == [500.0, 750.0, 1125.0]
    assert lines[0].startswith(
        "trial 1: maxBatchedTokens 256, maxSequences 64, continuous, 500 requests/s: TTFT p90 "
    )
    assert lines[0].endswith(": inside the limits")


async def test_sizes_that_do_not_start_are_over_the_limits(
    started: list[Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([TrialResult(1.0, 1.0), TrialResult(math.inf, 1.0), TrialResult(math.inf, 1.0)])
    monkeypatch.setattr(autotune_module, "result_of", lambda run: next(seen))
    lines: list[str] = []
    found = await autotune(TUNING, Sizes(16, 16), lines.append, ignore)

    assert started == [Sizes(16, 16), Sizes(16, 16, "sarathi")]
    assert "no room" in lines
    assert found.best is not None
    assert found.best.trial.sizes == Sizes(16, 16)


async def test_first_sizes_that_do_not_start_end_it(started: list[Sizes]) -> None:
    with pytest.raises(StartError, match="no room"):
        await autotune(TUNING, Sizes(32, 16), print, ignore)


def test_run_shows_its_two_latencies_and_failures() -> None:
    results = (
        RequestResult(0.0, 0.0, (0.1, 0.2, 0.5), 3),
        RequestResult(0.0, 0.0, (), 0, "HTTP 503"),
    )

    seen = result_of(LoadResult(results, 1.0, 0.0))
    assert (seen.ttft_p90_ms, seen.itl_p99_ms, seen.num_failed) == (
        pytest.approx(100),
        pytest.approx(298),
        1,
    )


def test_run_without_an_answer_is_an_error_that_says_why() -> None:
    with pytest.raises(StartError, match="no answer was complete, the first: HTTP 400"):
        result_of(LoadResult((RequestResult(0.0, 0.0, (), 0, "HTTP 400"),), 1.0, 0.0))


def test_best_sizes_are_a_section_to_paste() -> None:
    text = result_text(SearchResult(TRIED, [TRIED]), LatencyTargets(1000, 100))

    assert yaml.safe_load(text) == {
        "spec": {"engine": {"maxBatchedTokens": 512, "maxSequences": 64, "scheduler": "continuous"}}
    }
    assert text.startswith(
        "# 1.5 requests/s with TTFT p90 900 ms and ITL p99 80 ms, after 1 trials"
    )


def test_table_of_trials_is_ordered_by_rate_and_names_the_best_and_the_front() -> None:
    over = CompletedTrial(Trial(Sizes(512, 64), 3.0), TrialResult(2000.0, 90.0))
    absent = CompletedTrial(Trial(Sizes(64, 64), 1.0), TrialResult(math.inf, math.inf, 2))
    header, *rows = trial_rows(SearchResult(TRIED, [TRIED, over, absent]), LIMITS)

    assert header[:3] == ("REQUESTS/S", "TTFT P90 MS", "ITL P99 MS")
    assert rows == [
        ("1", "-", "-", "64", "64", "continuous", "over", ""),
        ("1.5", "900", "80", "512", "64", "continuous", "best", "TTFT, ITL"),
        ("3", "2000", "90", "512", "64", "continuous", "inside", "TTFT, ITL"),
    ]


def test_sarathi_gets_a_target_below_the_limit() -> None:
    tried = CompletedTrial(Trial(Sizes(512, 64, "sarathi"), 1.5), TrialResult(900.0, 80.0))
    engine = yaml.safe_load(result_text(SearchResult(tried, [tried]), LatencyTargets(1000, 100)))[
        "spec"
    ]["engine"]

    assert engine == {
        "maxBatchedTokens": 512,
        "maxSequences": 64,
        "scheduler": "sarathi",
        "tbtSloMilliseconds": 80.0,
    }
    parse(cluster(**engine))


def test_another_scheduler_takes_the_files_target_away() -> None:
    assert engine_values(Sizes(512, 64), LatencyTargets(1000, 100))["tbtSloMilliseconds"] is None


def test_nothing_inside_the_limits_says_how_near_it_came() -> None:
    text = result_text(SearchResult(None, [TRIED]), LatencyTargets(500, 100))

    assert text.startswith(
        "no trial was inside TTFT p90 500 ms and ITL p99 100 ms; the closest: 900 ms and 80 ms at "
        "1.5"
    )
    assert "raise a limit, lower --request-rate" in text


def cluster(**engine: object) -> dict[str, object]:
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"name": "small", "path": "small"},
            "roles": {"mixed": {"pools": [{"name": "cpu", "replicas": 1}], "engine": engine}},
            "engine": {"maxBatchedTokens": 512, "maxSequences": 32},
        },
    }


def test_search_starts_at_the_files_sizes() -> None:
    assert start_sizes(parse(cluster(threads=1))) == Sizes(512, 32)


def test_sizes_of_a_role_are_refused() -> None:
    with pytest.raises(
        InvalidObjectError, match=r"spec\.roles\.mixed\.engine\.scheduler: goes over"
    ):
        start_sizes(parse(cluster(scheduler="sarathi")))
    with pytest.raises(
        InvalidObjectError,
        match=r"spec\.roles\.mixed\.engine\.maxSequences: goes over .*; leave it out",
    ):
        start_sizes(parse(cluster(maxSequences=8)))
