"""The bench's loads: one seed gives every system the same requests and arrivals, another seed other
ones.
"""

import pytest
import workload as workload_module
from workload import FULL, GROUPS, QUICK, Workload

CLOSED = Workload("closed", 32, 4, 6, concurrency=3, temperature=1.0)
OPEN = Workload("open", 64, 4, 20, rate=2.0)
MIX = Workload("mix", 8, 4, 8, rate=2.0, shape="mix")
CHAT = Workload("chat", 16, 4, 6, concurrency=2, shape="chat")


def prompts(workload: Workload, seed: str = "seed", vocab_size: int = 49152) -> list[list[int]]:
    return [list(ask.prompt) for ask in workload.needs_ping(seed, vocab_size)]


def test_prompts_have_the_requested_length_and_stay_in_the_vocabulary() -> None:
    found = prompts(CLOSED, vocab_size=300)

    assert [len(prompt) for prompt in found] == [32] * 6
    assert all(256 <= token < 300 for prompt in found for token in prompt)


def test_asks_follow_from_seed_and_workload() -> None:
    assert (
        CLOSED.needs_ping("seed", 49152)
        == CLOSED.needs_ping("seed", 49152)
        != CLOSED.needs_ping("another", 49152)
    )
    assert prompts(CLOSED)[0] != prompts(OPEN)[0][:32]
    assert {
        (ask.temperature, ask.num_output_tokens) for ask in CLOSED.needs_ping("seed", 49152)
    } == {(1.0, 4)}


def test_pace_is_a_concurrency_or_arrivals_of_the_seed() -> None:
    assert (CLOSED.pace("seed").max_concurrency, CLOSED.pace("seed").arrivals_seconds) == (3, None)
    arrivals = OPEN.pace("seed").arrivals_seconds
    assert arrivals is not None
    assert arrivals[-1] == pytest.approx(10.0)
    assert arrivals == OPEN.pace("seed").arrivals_seconds != OPEN.pace("another").arrivals_seconds


def test_every_fourth_prompt_of_a_mix_is_long() -> None:
    long = workload_module.LONG_PROMPT_TOKENS

    assert [len(prompt) for prompt in prompts(MIX)] == [8, 8, 8, long] * 2


def test_turns_of_a_chat_share_their_beginnings() -> None:
    first, second, *later = prompts(CHAT)

    assert first[:16] == second[:16]
    assert first[16:] != second[16:]
    assert [len(prompt) for prompt in (first, *later)] == [20, 28, 28, 36, 36]
    assert (later[0][:20], later[2][:28]) == (first, later[0])


def test_warm_up_is_a_short_closed_loop_of_the_same_prompt_length() -> None:
    warm_up = OPEN.warm_up()

    assert (warm_up.num_prompt_tokens, warm_up.num_output_tokens, warm_up.rate) == (64, 4, None)
    assert warm_up.num_requests == warm_up.concurrency == 2
    assert {len(prompt) for prompt in prompts(CHAT.warm_up())} == {16}


@pytest.mark.parametrize("workload", [*FULL, *QUICK], ids=lambda workload: workload.describe())
def test_workloads_are_either_closed_or_open(workload: Workload) -> None:
    assert (workload.concurrency is None) != (workload.rate is None)
    assert str(workload.num_prompt_tokens) in workload.describe()


def test_quick_has_every_group() -> None:
    assert tuple(dict.fromkeys(workload.group for workload in QUICK)) == GROUPS
