"""The request trace: conversations that grow, bursts, lengths within their bounds, the same for the
same seed.
"""

import statistics
from itertools import pairwise

import pytest
from request_trace import Length, SimulationTrace, asks_of

TRACE = SimulationTrace(
    num_requests=400, seconds=60.0, block_tokens=4, system_blocks=2, max_input_tokens=200
)
ROWS = TRACE.rows("0")


def test_rows_come_in_bursts_within_the_time() -> None:
    times = [row.timestamp for row in ROWS]
    gaps = [later - earlier for earlier, later in pairwise(times)]

    assert (len(ROWS), times[0], times[-1]) == (400, 0, 60_000)
    assert times == sorted(times)
    # A Poisson process has 1; 400 gaps of a fixed seed give the trace's own 2 to about a quarter.
    assert 1.5 < statistics.pstdev(gaps) / statistics.mean(gaps) < 2.5


def test_blocks_of_a_row_cover_its_prompt() -> None:
    assert all(0 <= len(row.hash_ids) * 4 - row.input_length < 4 for row in ROWS)
    assert all(1 <= row.output_length <= TRACE.output.most for row in ROWS)
    assert max(row.input_length for row in ROWS) <= 200 + TRACE.question.most


def test_turns_begin_with_the_conversation_so_far_and_all_with_the_system_prompt() -> None:
    assert {row.hash_ids[:2] for row in ROWS} == {(0, 1)}
    seen: set[tuple[int, ...]] = set()
    num_further = 0
    for row in ROWS:
        num_further += row.hash_ids[2:3] != () and row.hash_ids[:3] in seen
        seen.add(row.hash_ids[:3])
    assert 0.35 < num_further / len(ROWS) < 0.6


def test_equal_blocks_are_equal_tokens() -> None:
    needs_ping = asks_of(ROWS, 4, range(100, 1000), "0")
    prompts = [ask.prompt for ask in needs_ping]

    assert [len(prompt) for prompt in prompts] == [row.input_length for row in ROWS]
    assert [ask.num_output_tokens for ask in needs_ping] == [row.output_length for row in ROWS]
    first: dict[int, tuple[int, ...]] = {}
    for row, prompt in zip(ROWS, prompts, strict=True):
        for index, hash_id in enumerate(row.hash_ids[:-1]):
            block = tuple(prompt[4 * index : 4 * index + 4])
            assert first.setdefault(hash_id, block) == block
    assert all(
        isinstance(prompt, list) and min(prompt) >= 100 and max(prompt) < 1000 for prompt in prompts
    )


def test_seed_decides_the_rows() -> None:
    assert TRACE.rows("0") == ROWS
    assert TRACE.rows("1") != ROWS


@pytest.mark.parametrize("num_requests", [1, 2])
def test_short_traces_are_traces(num_requests: int) -> None:
    assert len(SimulationTrace(num_requests=num_requests).rows("0")) == num_requests


def test_trace_says_its_sizes() -> None:
    trace = SimulationTrace(num_requests=9, seconds=3.0, output=Length(8, 0.5, 20))

    assert trace.in_words() == (
        "9 requests in 3 s, gaps with a coefficient of variation of 2; 64 tokens of system prompt, "
        "questions of 48 (median), 50% of them further turns, 8 out (median)"
    )
