"""Estimates by token-normalised moving averages of what one worker measures [O6]."""

import pytest

from pdcluster_worker.routing.qos.averages import Averages, Measured, Meter, queue_seconds
from pdcluster_worker.routing.waiting_time.request_queue import (
    QueuedRequest,
    QueueState,
    RequestQueue,
)
from tests.worker.fake_clock import FakeClock


def waiting(prompt_tokens: int, priority: int = 0) -> QueuedRequest:
    return QueuedRequest("g", prompt_tokens, 10, priority)


def decoding() -> QueuedRequest:
    return QueuedRequest("g", 100, 10, num_tokens=3)


def queue_state(*requests: QueuedRequest) -> QueueState:
    return QueueState(RequestQueue(requests), slots=64)


NEW = waiting(50, priority=100)


def test_meter_tells_what_passed_while_requests_waited_and_decoded() -> None:
    clock = FakeClock()
    meter = Meter(clock)
    meter.joined()
    clock.advance(0.4)
    assert meter.take() is None  # a second is not over
    meter.joined()
    meter.started(prompt_tokens=100)
    clock.advance(0.6)
    meter.token()
    meter.left(has_started=False)
    clock.advance(1.0)
    meter.left(has_started=True)

    measured = meter.take()
    assert measured is not None
    assert (measured.prompt_tokens, measured.first_tokens, measured.tokens, measured.ended) == (
        100,
        1,
        1,
        2,
    )
    assert measured.elapsed_seconds == pytest.approx(2.0)
    assert measured.busy_seconds == pytest.approx(2.0)
    assert measured.waiting_seconds == pytest.approx(1.0)
    assert (measured.stream_seconds, measured.decoding_seconds) == (
        pytest.approx(1.6),
        pytest.approx(1.6),
    )
    assert (meter.num_waiting, meter.num_streams, meter.take()) == (0, 0, None)


def test_first_token_is_estimated_by_the_formula_of_the_document() -> None:
    """[O6]: prefill_q * avg_prefill + decode_q * avg_decode, each request with its own tokens."""
    averages = Averages()
    averages.refresh(
        Measured(
            1.0,
            waiting_seconds=1.0,
            prompt_tokens=1000,
            stream_seconds=2.0,
            decoding_seconds=1.0,
            tokens=40,
        )
    )
    queue = queue_state(waiting(300), waiting(100), decoding(), decoding())

    assert averages.prompt_token_seconds == pytest.approx(0.001)
    assert averages.estimated_tpot_seconds(2) == pytest.approx(0.05)
    assert averages.estimated_ttft_seconds(NEW, queue) == pytest.approx(
        queue_seconds(2, 200 * 0.001, 2, 0.05 / 2)
    )
    assert averages.estimated_ttft_seconds(NEW, queue_state()) == 0.0
    assert averages.estimated_completion_seconds(NEW, queue) == pytest.approx(0.45 + 9 * 0.05)


def test_only_requests_that_are_served_before_count() -> None:
    averages = Averages()
    averages.refresh(Measured(1.0, waiting_seconds=1.0, prompt_tokens=1000))

    assert (
        averages.estimated_ttft_seconds(
            waiting(1, priority=-100), queue_state(waiting(300), waiting(100, 100))
        )
        == 0.0
    )
    assert averages.estimated_ttft_seconds(
        NEW, queue_state(waiting(300), waiting(100, 1000))
    ) == pytest.approx(0.3)


def test_nothing_is_estimated_before_anything_was_measured() -> None:
    averages = Averages()

    assert averages.estimated_ttft_seconds(NEW, queue_state(waiting(300))) is None
    assert averages.estimated_tpot_seconds(3) is None
    assert averages.estimated_completion_seconds(NEW, queue_state(waiting(300))) is None
    assert (averages.firsts_per_second, averages.ends_per_second) == (0.0, 0.0)


def test_averages_follow_the_worker_and_weigh_by_tokens() -> None:
    """A second of few tokens counts for less than one of many, and old ones fade."""
    averages = Averages()
    averages.refresh(Measured(1.0, waiting_seconds=1.0, prompt_tokens=900))
    averages.refresh(Measured(1.0, waiting_seconds=1.0, prompt_tokens=100))
    assert averages.prompt_token_seconds == pytest.approx(1.8 / 820)

    for _ in range(30):
        averages.refresh(
            Measured(
                1.0,
                waiting_seconds=1.0,
                prompt_tokens=100,
                first_tokens=2,
                ended=4,
                busy_seconds=1.0,
            )
        )
    assert averages.prompt_token_seconds == pytest.approx(0.01, rel=0.01)
    assert (averages.firsts_per_second, averages.ends_per_second) == (
        pytest.approx(2, rel=0.01),
        pytest.approx(4, rel=0.01),
    )


def test_a_second_without_a_first_token_makes_the_wait_longer() -> None:
    averages = Averages()
    averages.refresh(Measured(1.0, waiting_seconds=1.0, prompt_tokens=1000))
    averages.refresh(Measured(1.0, waiting_seconds=1.0))

    assert averages.prompt_token_seconds == pytest.approx(1.8 / 800)


def test_time_of_a_token_grows_with_each_stream_that_joins() -> None:
    averages = Averages()
    for streams, gap in ((2, 0.030), (6, 0.050), (2, 0.030), (6, 0.050)):
        averages.refresh(
            Measured(
                1.0,
                stream_seconds=float(streams),
                decoding_seconds=1.0,
                tokens=round(streams / gap),
            )
        )

    assert averages.estimated_tpot_seconds(7) == pytest.approx(0.055, rel=0.02)
    assert averages.estimated_tpot_seconds(0) is None


def test_hours_without_a_request_leave_no_trace_in_the_pace() -> None:
    """Retry-After goes by the pace while there is work, and what is older than minutes counts for
    nothing.
    """
    clock, averages = FakeClock(), Averages()
    meter = Meter(clock)

    def serve(prompt_tokens: int, seconds: float) -> None:
        meter.joined()
        clock.advance(seconds)
        meter.started(prompt_tokens)
        meter.left(has_started=True)
        averages.refresh(meter.take() or Measured())

    for _ in range(20):
        serve(100, 1.0)
    slow = (averages.firsts_per_second, averages.ends_per_second, averages.prompt_token_seconds)
    clock.advance(4 * 3600.0)
    averages.refresh(meter.take() or Measured())
    after_pause = (
        averages.firsts_per_second,
        averages.ends_per_second,
        averages.prompt_token_seconds,
    )
    clock.advance(4 * 3600.0)
    for _ in range(5):
        serve(100, 0.25)

    assert slow == pytest.approx((1.0, 1.0, 0.01))
    assert after_pause == pytest.approx(slow)  # nothing better is known
    assert (averages.firsts_per_second, averages.ends_per_second) == (
        pytest.approx(4.0, rel=0.01),
        pytest.approx(4.0, rel=0.01),
    )
    assert averages.prompt_token_seconds == pytest.approx(0.0025, rel=0.01)
