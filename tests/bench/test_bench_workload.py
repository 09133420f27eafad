"""The bench's loads: one seed gives every system the same prompts and arrivals, another seed other ones."""

from itertools import pairwise

import pytest
from workload import FULL, QUICK, Workload

CLOSED = Workload("closed", 32, 4, 6, rounds=1, concurrency=3)
OPEN = Workload("open", 64, 4, 20, rounds=1, rate=2.0)


def test_prompts_have_the_asked_length_and_stay_in_the_vocabulary() -> None:
    prompts = CLOSED.prompts("seed", 300)

    assert [len(prompt) for prompt in prompts] == [32] * 6
    assert all(256 <= token < 300 for prompt in prompts for token in prompt)


def test_prompts_follow_from_seed_and_workload() -> None:
    assert CLOSED.prompts("seed", 49152) == CLOSED.prompts("seed", 49152)
    assert CLOSED.prompts("seed", 49152) != CLOSED.prompts("another", 49152)
    assert CLOSED.prompts("seed", 49152)[0] != OPEN.prompts("seed", 49152)[0][:32]


def test_arrivals_keep_the_mean_rate_and_their_order() -> None:
    arrivals = OPEN.arrivals("seed")

    assert arrivals[-1] == pytest.approx(10.0)
    assert arrivals == sorted(arrivals)
    assert len({round(after - before, 6) for before, after in pairwise(arrivals)}) > 1


def test_arrivals_follow_from_the_seed() -> None:
    assert OPEN.arrivals("seed") == OPEN.arrivals("seed") != OPEN.arrivals("another")


def test_warm_up_is_a_short_closed_loop_of_the_same_prompt_length() -> None:
    warm_up = OPEN.warm_up()

    assert (warm_up.num_prompt_tokens, warm_up.num_output_tokens, warm_up.rate) == (64, 4, None)
    assert warm_up.num_requests == warm_up.concurrency == 2


@pytest.mark.parametrize("workload", [*FULL, *QUICK], ids=lambda workload: workload.name)
def test_workloads_are_either_closed_or_open(workload: Workload) -> None:
    assert (workload.concurrency is None) != (workload.rate is None)
    assert str(workload.num_prompt_tokens) in workload.describe()
