"""A prefill worker that lacks a prefix which the decode worker holds, as in a chat of many turns.

It gets the KV, and computes the rest alone.
"""

import pytest

from tests.system.cluster import NewCluster, Pair
from tests.system.worker_process import Metrics

BLOCK = 16


@pytest.fixture
def new_pair(new_cluster: NewCluster) -> Pair:
    """A pair that has measured nothing: the rates that it has measured decide what is given."""
    cluster = new_cluster("giving")
    prefill = cluster.add_worker("prefill", "giving-prefill-0")
    decode = cluster.add_worker("decode", "giving-decode-0")
    cluster.wait_ready()
    return Pair(cluster, prefill, decode)


def num_computed(pair: Pair, before: Metrics) -> float:
    return pair.prefill.growth(before, "engine_step_tokens_sum", kind="prefill")


def test_next_turn_of_a_chat_is_not_computed_again(new_pair, prompts, reference):
    """The first turn is prefilled and answered by the decode worker, the second goes to prefill."""
    first = prompts(10 * BLOCK)
    answer = new_pair.decode.client.complete(first, "local", max_tokens=2 * BLOCK + 1)
    turn = [*first, *answer.tokens, *prompts(40)]
    held = 12 * BLOCK  # the full blocks of prompt and answer
    before, decode_before = new_pair.prefill.metrics(), new_pair.decode.metrics()

    second = new_pair.decode.client.complete(turn, "remote")

    assert second.prefill == "remote"
    reference.check(turn, second.tokens)
    assert second.cached_tokens == held
    new_pair.decode.wait_growth(decode_before, "kv_prefixes_given_total", 1, outcome="ok")
    new_pair.prefill.wait_growth(before, "kv_prefixes_taken_total", 1)
    assert num_computed(new_pair, before) == len(turn) - held
    new_pair.prefill.wait_growth(
        before, "kv_transfer_bytes_total", 12 * new_pair.prefill.block_bytes, direction="received"
    )


def test_prefix_that_both_hold_is_not_sent(pair, prompts, reference):
    prompt = prompts(10 * BLOCK)
    pair.decode.client.complete(prompt, "remote", max_tokens=1)

    def is_given() -> bool:
        turn, before = [*prompt, *prompts(40)], pair.decode.metrics()
        reference.check(turn, pair.decode.client.complete(turn, "remote").tokens)
        return pair.decode.growth(before, "kv_prefixes_given_total", outcome="ok") > 0

    # its report of what it has cached comes once a second
    pair.decode.wait_for(lambda: not is_given(), "the decode worker knows that both have it")
