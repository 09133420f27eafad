"""Time that fetches are under way, by what the engine's page says."""

from pdcluster_worker.stock_engine.engine_load import FETCH_SECONDS, Fetches


def requested(*requests: tuple[str, int]) -> Fetches:
    """Fetches of (request, priority), one a second from 0 on."""
    fetches = Fetches()
    for second, (request_id, priority) in enumerate(requests):
        fetches.begun(request_id, priority, float(second))
    return fetches


def test_time_in_the_engine_s_queue_does_not_count() -> None:
    fetches = requested(("a", 0), ("b", 0))
    for second in range(2, 200):
        fetches.seen(num_to_start=1, num_complete=0, requested_at=float(second))

    assert fetches.overdue(200.0) == ["a"]

    fetches.ended("a")
    fetches.seen(num_to_start=0, num_complete=0, requested_at=200.0)

    assert fetches.overdue(200.0 + FETCH_SECONDS - 1) == []
    assert fetches.overdue(200.0 + FETCH_SECONDS) == ["b"]


def test_the_last_of_the_engine_s_order_wait() -> None:
    """A lower priority goes first."""
    fetches = requested(("late", 5), ("early", 0), ("middle", 2))
    fetches.seen(num_to_start=2, num_complete=0, requested_at=3.0)

    assert fetches.overdue(3.0 + FETCH_SECONDS) == ["early"]


def test_one_under_way_stays_so_when_a_better_priority_comes() -> None:
    fetches = requested(("first", 5))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=1.0)
    fetches.begun("urgent", 0, 2.0)
    for second in range(3, 40):
        fetches.seen(num_to_start=1, num_complete=0, requested_at=float(second))

    assert fetches.overdue(40.0) == ["first"]


def test_time_under_way_counts_on_while_an_earlier_one_has_come() -> None:
    fetches = requested(("come", 0), ("hung", 0))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=2.0)
    fetches.seen(num_to_start=0, num_complete=1, requested_at=3.0)

    assert fetches.overdue(2.0 + FETCH_SECONDS) == ["hung"]


def test_a_hung_one_is_given_up_while_others_come_and_go() -> None:
    fetches = requested(("hung", 0))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=1.0)
    for second in range(2, 40):
        fetches.begun(f"other-{second}", 0, second - 0.5)
        fetches.seen(num_to_start=0, num_complete=1, requested_at=float(second))
        if second < 1 + FETCH_SECONDS:
            assert fetches.overdue(float(second)) == []
        if second < 39:
            fetches.ended(f"other-{second}")

    assert fetches.overdue(39.0) == ["hung"]


def test_an_urgent_one_that_has_its_token_first_overtakes_none() -> None:
    fetches = requested(("come", 5))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=1.0)
    fetches.begun("urgent", 0, 2.0)
    fetches.seen(num_to_start=0, num_complete=2, requested_at=3.0)
    fetches.ended("urgent")
    fetches.begun("later", 5, 4.0)
    fetches.seen(num_to_start=0, num_complete=1, requested_at=5.0)

    assert fetches.overdue(5.0 + FETCH_SECONDS) == ["later"]


def test_kv_that_has_come_is_not_timed() -> None:
    fetches = requested(("a", 0))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=1.0)
    fetches.seen(num_to_start=0, num_complete=1, requested_at=2.0)

    assert fetches.overdue(1000.0) == []


def test_a_page_says_nothing_of_a_later_fetch() -> None:
    fetches = requested(("a", 0), ("b", 0))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=0.5)

    assert fetches.overdue(1000.0) == ["a"]


def test_an_ended_fetch_is_forgotten() -> None:
    fetches = requested(("a", 0))
    fetches.seen(num_to_start=0, num_complete=0, requested_at=1.0)
    fetches.ended("a")

    assert fetches.overdue(1000.0) == []
    assert not len(fetches)
