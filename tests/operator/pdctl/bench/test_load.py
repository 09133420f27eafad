"""The load generator, against targets that answer well, badly or not at all."""

import asyncio
from itertools import pairwise

import pytest

from pdctl.bench.load import Arrivals, BenchRequest, OnChunk, TokenUsage, poisson_arrivals, run_load


class Echo:
    """Answers with as many tokens as asked less `missing`; remembers the most requests it had at a
    time.
    """

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.num_now = self.num_most = 0

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        for _ in range(ask.num_output_tokens - self.missing):
            await asyncio.sleep(0)
            on_chunk()
        self.num_now -= 1
        return TokenUsage(ask.num_output_tokens - self.missing)


class Silent:
    """Never answers."""

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        await asyncio.Event().wait()
        return TokenUsage(0)


ASK = BenchRequest([300] * 8, 3)


async def test_closed_loop_keeps_its_concurrency_and_sends_all() -> None:
    echo = Echo()

    run = await run_load(echo, [ASK] * 7, Arrivals(max_concurrency=3))

    assert (len(run.complete), echo.num_most) == (7, 3)
    assert {(one.num_tokens, one.num_prompt_tokens) for one in run.complete} == {(3, 8)}
    assert run.duration_seconds > 0


async def test_closed_loop_request_is_due_when_there_is_room() -> None:
    run = await run_load(Echo(), [ASK] * 4, Arrivals(max_concurrency=1))

    ends = [one.chunk_seconds[-1] for one in run.results]
    assert all(
        one.scheduled_seconds >= end for one, end in zip(run.results[1:], ends, strict=False)
    )


async def test_open_loop_sends_each_request_at_or_after_its_time() -> None:
    run = await run_load(Echo(), [ASK] * 5, Arrivals(poisson_arrivals(500.0, 5, "seed")))

    assert len(run.complete) == 5
    assert all(one.started_seconds >= one.scheduled_seconds for one in run.results)


async def test_wait_for_room_after_an_arrival_counts() -> None:
    run = await run_load(Echo(), [ASK] * 3, Arrivals([0.0, 0.0, 0.0], max_concurrency=1))

    assert len({one.scheduled_seconds for one in run.results}) == 1
    assert run.results[2].ttft_seconds > run.results[0].ttft_seconds


async def test_answer_with_missing_tokens_is_a_failure() -> None:
    run = await run_load(Echo(missing=1), [ASK] * 2, Arrivals(max_concurrency=2))

    assert run.failures == ["2 tokens in 2 chunks, expected 3 tokens"] * 2


async def test_answer_that_may_end_early_is_complete() -> None:
    run = await run_load(Echo(missing=1), [BenchRequest("text", 3, ignore_eos=False)], Arrivals())

    assert (run.failures, run.results[0].num_tokens) == ([], 2)


async def test_answer_that_never_comes_is_a_failure() -> None:
    run = await run_load(Silent(), [ASK], Arrivals(max_concurrency=1, limit_seconds=0.01))

    assert run.failures == ["no complete answer in 0.01 s"]


def test_arrivals_keep_the_mean_rate_and_their_order() -> None:
    arrivals = poisson_arrivals(2.0, 20, "seed")

    assert arrivals[-1] == pytest.approx(10.0)
    assert arrivals == sorted(arrivals)
    assert len({round(after - before, 6) for before, after in pairwise(arrivals)}) > 1


def test_arrivals_follow_from_the_seed() -> None:
    assert (
        poisson_arrivals(2.0, 9, "a")
        == poisson_arrivals(2.0, 9, "a")
        != poisson_arrivals(2.0, 9, "b")
    )
