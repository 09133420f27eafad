"""[R1] [R2] [R3] [R6]: the document's formula and its online parameters."""

from itertools import pairwise

import pytest

from pdcluster_worker.routing.waiting_time.rwt import DecodeTime, MeanOutput, completion_seconds

PRESET = 0.00952
PARAMETERS = {"mean_output": 2646.0, "max_output": 8192.0, "token_seconds": 0.01027}


def test_t_of_n_is_the_formula() -> None:
    seconds = completion_seconds(
        15, mean_output=2000.0, max_output=4000.0, token_seconds=0.01, prefill_seconds=3.0
    )

    assert seconds == pytest.approx(14 * 2000 / (1 / 0.01) + 3 + 4000 * 0.01)


@pytest.mark.parametrize(("num_requests", "published"), [(10, 314), (15, 463), (20, 612)])
def test_t_of_n_is_near_the_published_estimates(num_requests: int, published: float) -> None:
    """The document gives neither mu nor maxO of these: 2646 is B3's 1916 over 1 - 27.6 %, 8192 the
    longest sequence.
    """
    assert completion_seconds(num_requests, **PARAMETERS) == pytest.approx(published, rel=0.05)


def test_t_of_n_grows_with_n() -> None:
    values = [completion_seconds(n, **PARAMETERS) for n in range(1, 50)]

    assert all(shorter < longer for shorter, longer in pairwise(values))


def test_one_request_is_taken_at_its_worst() -> None:
    """[R6]"""
    assert completion_seconds(1, **PARAMETERS) == pytest.approx(8192 * 0.01027)


def test_more_lanes_serve_what_is_before_the_last_sooner() -> None:
    one, four = (
        completion_seconds(9, mean_output=100.0, max_output=500.0, token_seconds=0.01, lanes=n)
        for n in (1, 4)
    )

    assert (one, four) == (pytest.approx(8 + 5), pytest.approx(2 + 5))


def test_decode_time_is_the_preset_until_five_valid_completions() -> None:
    decode = DecodeTime(PRESET)
    for _ in range(4):
        decode.observe(2.0, 100)
        assert decode.seconds == PRESET
    decode.observe(2.0, 100)

    assert decode.seconds == pytest.approx(0.02 + (PRESET - 0.02) * 0.9**5)


def test_decode_time_ignores_completions_under_50_tokens() -> None:
    decode = DecodeTime(PRESET)
    for _ in range(20):
        decode.observe(49.0, 49)
    assert decode.seconds == PRESET
    for _ in range(5):
        decode.observe(0.5, 50)

    assert decode.seconds == pytest.approx(0.01 + (PRESET - 0.01) * 0.9**5)


def test_decode_time_converges_as_published() -> None:
    """[R4]: from .00952 to .01027 s a token."""
    decode = DecodeTime(PRESET)
    for _ in range(60):
        decode.observe(26.18 * 1.027, 2618)

    assert decode.seconds == pytest.approx(0.01027, rel=1e-3)


def test_decode_time_without_a_preset_is_unknown_and_then_measured() -> None:
    decode = DecodeTime(None)
    for _ in range(4):
        decode.observe(1.0, 100)
        assert decode.seconds is None
    decode.observe(1.0, 100)

    assert decode.seconds == pytest.approx(0.01)


def test_mean_output_is_of_each_group_and_counts_from_five_samples_on() -> None:
    output = MeanOutput(2646)
    for tokens in (1000, 2000, 3000, 4000, 49):
        output.observe("I", tokens)
    assert output.tokens("I") == 2646
    output.observe("I", 5000)

    assert output.tokens("I") == 3000
    assert output.tokens("B3") == 2646


def test_mean_output_forgets_the_group_that_was_used_least_recently() -> None:
    output = MeanOutput(100)
    for number in range(100):
        for _ in range(5):
            output.observe(str(number), 50)
        assert output.tokens("0") == 50  # used all the time

    assert output.tokens("1") == 100
    assert output.tokens("99") == 50
