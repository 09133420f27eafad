"""Pauses between attempts."""

from pdcluster_worker.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(first_seconds=0.5, max_seconds=3.0)
    pauses = [backoff.next_seconds() for _ in range(5)]
    backoff.reset()

    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.next_seconds() == 0.5
