"""The approximate index: what was sent lately, and nothing older [Y11]."""

from pdcluster_worker.routing.recent_prefixes import RECENT_SECONDS, RecentPrefixes

A, B, C = b"a", b"b", b"c"


def test_recent_prefixes_last_120_seconds_by_default() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A], now=0.0)

    assert RECENT_SECONDS == 120.0
    assert recent.match_all([A], now=120.0) == {"d0": 1}
    assert recent.match_all([A], now=120.1) == {}


def test_recent_prefixes_count_leading_blocks_only() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A, B, C], now=0.0)
    recent.note("d1", [B, C], now=0.0)

    assert recent.match_all([A, B, b"x", C], now=1.0) == {"d0": 2}
    assert recent.match_all([], now=1.0) == {}


def test_recent_prefix_sent_again_stays() -> None:
    recent = RecentPrefixes(seconds=10.0)
    recent.note("d0", [A], now=0.0)
    recent.note("d0", [A], now=8.0)
    recent.note("d1", [B], now=12.0)  # what is older than 10 seconds goes now

    assert recent.match_all([A], now=15.0) == {"d0": 1}
    assert len(recent) == 2


def test_recent_prefixes_within_fewer_seconds() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A], now=0.0)
    recent.note("d1", [A], now=9.0)

    assert recent.match_all([A], now=10.0, within=2.0) == {"d1": 1}


def test_recent_prefixes_of_a_worker_that_goes_are_dropped() -> None:
    recent = RecentPrefixes()
    recent.note("d0", [A, B], now=0.0)
    recent.note("d1", [A], now=0.0)
    recent.drop("d0", now=1.0)
    recent.drop("never", now=1.0)
    assert recent.match_all([A, B], now=2.0) == {"d1": 1}

    recent.note("d0", [A], now=3.0)
    assert recent.match_all([A, B], now=4.0) == {"d0": 1, "d1": 1}


def test_recent_prefixes_are_bounded_and_forget_the_oldest() -> None:
    recent = RecentPrefixes(max_blocks=2)
    for number, block in enumerate((A, B, C)):
        recent.note("d0", [block], now=float(number))

    assert len(recent) == 2
    assert recent.match_all([A], now=3.0) == {}
    assert recent.match_all([C], now=3.0) == {"d0": 1}
