"""T1 and T10: a client that goes away, whatever its request is doing, cancels both legs and leaves
no block behind.
"""

import pytest

from tests.system.worker_process import Metrics, WorkerProcess

LONG = 1500
"""Tokens: some four hundred chunks of the slow cluster's workers."""

ATTEMPTS = 8
"""To leave in the right moment, which a fast engine on a busy machine makes short."""


def has_token(worker: WorkerProcess, before: Metrics) -> bool:
    return worker.growth(before, "generation_tokens_total") > 0


def test_abort_while_decoding(pair, prompts):
    for place in ("local", "remote"):
        with pair.decode.client.stream(prompts(100), place, max_tokens=1500) as stream:
            stream.read_tokens(5)
            pair.decode.wait_for(lambda: pair.decode.blocks()["in_use"] > 0, "the request decodes")
        pair.cluster.wait_settled()


def test_abort_of_a_whole_answer(pair, prompts):
    with pair.decode.client.unread(prompts(100), "local", max_tokens=1500, stop=["never"]):
        pair.decode.wait_for(
            lambda: pair.decode.metrics().value("num_requests_running") > 0, "the request runs"
        )
    pair.cluster.wait_settled()


def test_abort_while_prefilling_locally(slow, prompts):
    def is_in_time() -> bool:
        before = slow.decode.metrics()
        with slow.decode.client.unread(prompts(LONG), "local"):
            slow.decode.wait_for(
                lambda: slow.decode.blocks()["in_use"] > 0 or has_token(slow.decode, before),
                "the prefill has begun",
            )
        slow.cluster.wait_settled()
        return not has_token(slow.decode, before)

    assert any(is_in_time() for _ in range(ATTEMPTS))


def test_abort_while_prefilling_remotely(slow, prompts):
    def is_in_time() -> bool:
        before, prefill_before = slow.decode.metrics(), slow.prefill.metrics()
        with slow.decode.client.unread(prompts(LONG), "remote"):
            slow.prefill.wait_for(
                lambda: (
                    slow.prefill.blocks()["in_use"] > 0 or has_token(slow.prefill, prefill_before)
                ),
                "the prefill worker has begun",
            )
            assert slow.decode.blocks()["receiving"] > 0
        slow.cluster.wait_settled()
        slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="cancelled")
        return not has_token(slow.prefill, prefill_before)

    assert any(is_in_time() for _ in range(ATTEMPTS))


def test_abort_while_waiting_for_a_credit(slow, prompts):
    before, num_blocks = slow.decode.metrics(), -(-LONG // 16)
    with slow.prefill.engine_stopped():  # so that the first request keeps its credit
        with slow.decode.client.unread(prompts(LONG), "remote"):
            slow.decode.wait_for(
                lambda: slow.decode.blocks()["receiving"] == num_blocks,
                "the first request has the credit",
            )
            with slow.decode.client.unread(prompts(LONG), "remote"):
                slow.decode.wait_for(
                    lambda: slow.decode.metrics().value("prefill_queue_requests") == 1,
                    "the second one waits",
                )
                assert slow.decode.blocks()["receiving"] == num_blocks  # it holds none
            slow.decode.wait_for(
                lambda: slow.decode.metrics().value("prefill_queue_requests") == 0,
                "the queue is empty again",
            )
        slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="cancelled")
    slow.cluster.wait_settled()


def test_abort_while_queued_in_the_engine(slow, prompts):
    def is_in_time() -> bool:
        others = [prompts(LONG) for _ in range(2)]
        with (
            slow.decode.client.unread(others[0], "local"),
            slow.decode.client.unread(others[1], "local"),
        ):
            slow.decode.wait_for(lambda: slow.decode.blocks()["in_use"] > 0, "the engine is busy")
            with slow.decode.client.unread(prompts(400), "local"):
                waits = slow.decode.metrics().value("num_requests_waiting") > 0
        slow.cluster.wait_settled()
        return waits

    assert any(is_in_time() for _ in range(ATTEMPTS))


def test_one_choice_that_stops_leaves_its_siblings(pair, prompts, reference):
    prompt = prompts(40)
    expected = reference.greedy(prompt, 8)

    answer = pair.decode.client.complete(prompt, "remote", n=2, stop=[f"[{expected[4]}]"])

    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.tokens == expected[: expected.index(expected[4])]


@pytest.mark.parametrize("prefill", ["local", "remote"])
def test_many_clients_leave_at_once(pair, prompts, prefill):
    streams = [pair.decode.client.stream(prompts(120), prefill, max_tokens=1000) for _ in range(10)]
    for stream in streams:
        opened = stream.__enter__()
        opened.read_tokens(1)
    for stream in streams:
        stream.__exit__(None, None, None)
    pair.cluster.wait_settled()
