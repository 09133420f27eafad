"""`pdctl why` of a cluster that sleeps says so."""

from datetime import UTC, datetime

from pdcluster_schema import conditions as words
from pdctl.cli.present import present_lines

SINCE = "2026-01-02T03:04:05Z"


def lines(reason: str) -> list[str]:
    ready = {
        "type": words.READY,
        "status": "True",
        "reason": reason,
        "message": "all workers sleep",
        "lastTransitionTime": SINCE,
    }
    return present_lines({"status": {"conditions": [ready]}}, (), datetime.now(UTC))


def test_a_cluster_that_sleeps_says_so_and_one_that_serves_nothing():
    assert lines(words.SCALED_TO_ZERO) == [f"Ready (ScaledToZero) since {SINCE}: all workers sleep"]
    assert lines(words.AS_DECLARED) == []
