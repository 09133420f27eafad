"""The bench of agreement: what it counts as equal, and what its tables say."""

import json
from pathlib import Path

import agreement as agreement_bench
import pytest
from agreement_figures import (
    Agreement,
    Difference,
    agreement,
    agreement_table,
    first_difference,
    until_end,
)

from pdcluster_api.errors import StartError
from pdctl.bench.openai import OpenAIServer, http_session
from tests.make_tiny_model import make_tiny_model
from tests.operator.pdctl.bench.small_servers import serving
from tests.system.prompts import Prompts

EXPECTED = [[1, 2, 3, 4], [5, 6, 0], [7, 8, 9, 9]]


def test_agreement_counts_tokens_before_the_first_difference_and_asks_there_once():
    requested = []

    def judge(index, said, expected, actual):
        requested.append((index, said, expected, actual))
        return 0.125, True

    found = agreement(EXPECTED, [[1, 2, 3, 4], [5, 0], [7, 8, 1, 9]], judge)

    assert found == Agreement(
        3, 11, 4 + 1 + 2, [Difference(1, 0.125, True), Difference(2, 0.125, True)]
    )
    assert requested == [(1, [5], 6, 0), (2, [7, 8], 9, 1)]


def test_agreement_of_the_same_answers_has_no_margin():
    found = agreement(EXPECTED, EXPECTED, pytest.fail)

    assert (found.num_equal, found.differences) == (11, [])
    assert agreement_table([("remote", found)]).splitlines()[2].split("|")[1:5] == [
        " remote ",
        " 3 of 3 (100.0 %) ",
        " 11 of 11 (100.0 %)                       ",
        " -            ",
    ]


def test_table_shows_the_median_and_the_greatest_margin():
    differences = [
        Difference(3, 0.0, True),
        Difference(9, 0.25, False),
        Difference(1, 0.0625, True),
    ]
    row = agreement_table([("remote", Agreement(4, 200, 150, differences))]).splitlines()[2]

    assert [text.strip() for text in row.split("|")[2:-1]] == [
        "1 of 4 (25.0 %)",
        "150 of 200 (75.0 %)",
        "0.0625",
        "0.25",
        "2 of 3",
    ]


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([0], [1, 0], 0)]
)
def test_first_difference_is_a_place_or_none(one, other, place):
    assert first_difference(one, other) == place


def test_answers_end_with_the_end_of_sequence_token():
    assert (until_end([5, 2, 7, 2], 2), until_end([5, 7], 2)) == ([5, 2], [5, 7])


def test_bench_takes_every_path_and_compares_it(tmp_path: Path):
    """On a tiny model in float32, where all sources agree; prompts of one group, with more blocks
    than the preempted path has.
    """
    source = Prompts("agreement")
    work = agreement_bench.Work([source(100) for _ in range(agreement_bench.GROUP)], 20, end=-1)
    text = agreement_bench.compare(make_tiny_model("llama", tmp_path), "float32", work)

    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "equal answers" not in line
    ]
    assert len(rows) == 1 + len(agreement_bench.PATHS) + len(agreement_bench.PATHS) - 1
    assert [row for row in rows if "18 of 18" not in row and "17 of 18" not in row] == []


async def test_vllm_returns_greedy_token_ids():
    work = agreement_bench.Work([[5, 6]], 3, end=-1)
    reply = json.dumps({"choices": [{"token_ids": [7, 8, 9]}]}).encode()
    async with serving(lambda body: reply) as small, http_session() as session:
        server = OpenAIServer(session, small.base_url, "small")
        found = await agreement_bench._vllm_answer(server, [5, 6], work)

    assert found == [7, 8, 9]
    wanted = {
        "model": "small",
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0,
        "return_token_ids": True,
    }
    assert small.bodies == [wanted]


async def test_vllm_that_refuses_is_an_error_that_shows_it():
    work = agreement_bench.Work([[5]], 3, end=-1)
    async with serving(lambda body: b"too long", status=400) as small, http_session() as session:
        with pytest.raises(StartError, match="HTTP 400: too long"):
            await agreement_bench._vllm_answer(
                OpenAIServer(session, small.base_url, "small"), [5], work
            )
