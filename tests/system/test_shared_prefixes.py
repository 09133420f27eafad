"""Prompts that begin alike and come at once, as the first turns of chats with one system prompt.

The prefix is computed by the prefill worker once and sent once; the rest is computed where it is.
"""

from concurrent.futures import ThreadPoolExecutor

BLOCK = 16
SHARED = 20 * BLOCK  # over the default threshold of 256


def test_prefix_of_prompts_that_come_at_once_is_computed_and_sent_once(pair, prompts, reference):
    shared = prompts(SHARED)
    requested = [[*shared, *prompts(20)] for _ in range(6)]
    before, decode_before = pair.prefill.metrics(), pair.decode.metrics()

    with ThreadPoolExecutor(len(requested)) as pool:
        answers = list(pool.map(pair.decode.client.complete, requested))

    for prompt, answer in zip(requested, answers, strict=True):
        reference.check(prompt, answer.tokens)
    assert sorted(answer.prefill for answer in answers) == ["local"] * 5 + ["remote"]
    assert {answer.cached_tokens for answer in answers if answer.prefill == "local"} == {SHARED}
    pair.decode.wait_growth(decode_before, "remote_prefill_total", 1, outcome="ok")
    assert pair.prefill.growth(before, "engine_step_tokens_sum", kind="prefill") == SHARED + 20


def test_prompts_go_on_when_the_client_of_the_first_leaves(pair, prompts, reference):
    shared = prompts(SHARED)
    requested = [[*shared, *prompts(20)] for _ in range(3)]

    with ThreadPoolExecutor(len(requested)) as pool:
        with pair.decode.client.unread([*shared, *prompts(20)]):
            answers = pool.map(pair.decode.client.complete, requested)

        for prompt, answer in zip(requested, answers, strict=True):
            reference.check(prompt, answer.tokens)
