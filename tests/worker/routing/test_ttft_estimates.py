"""Expected cost of a first token on each side, by measurements."""

import pytest

from pdcluster_worker.routing.offload import OffloadDecision, OffloadFacts
from pdcluster_worker.routing.ttft import (
    MANY_SAMPLES,
    MIN_SAMPLES,
    PROBE_GAP,
    PROBE_SECONDS,
    Side,
    TtftEstimates,
)


def measured(seconds_per_token: float = 0.001, side: Side = "local") -> TtftEstimates:
    costs = TtftEstimates()
    for number in range(MIN_SAMPLES):
        costs.first_token(side, str(number), 100, 100 * seconds_per_token, 0.0)
    return costs


def test_nothing_is_expected_before_enough_was_measured() -> None:
    costs = TtftEstimates()
    for _ in range(MIN_SAMPLES - 1):
        costs.first_token("local", "r", 100, 0.1, 0.0)
    costs.first_token("local", "r", 0, 0.1, 0.0)  # all of it was cached
    costs.first_token("local", "r", 100, None, 0.0)
    known = costs.known(OffloadFacts(prompt_tokens=100), 0.0)

    assert (known.local_seconds, known.remote_seconds) == (0.0, 0.0)


def test_a_prompt_waits_for_those_before_it_less_what_is_done_of_the_first() -> None:
    costs = measured()
    costs.sent("local", "a", 300, 10.0)
    costs.sent("local", "b", 200, 10.1)

    assert costs.seconds("local", 100, 10.0) == pytest.approx(0.6)
    assert costs.seconds("local", 100, 10.2) == pytest.approx(0.4)
    # the first is late: it is not done twice
    assert costs.seconds("local", 100, 99.0) == pytest.approx(0.3)
    costs.ended("a")
    assert costs.seconds("local", 100, 10.2) == pytest.approx(0.1 + 0.2 - 0.2)


def test_tokens_that_others_sent_count_and_workers_share_them() -> None:
    costs = measured(side="remote")

    assert costs.seconds("remote", 100, 0.0, others=900) == pytest.approx(1.0)
    assert costs.seconds("remote", 100, 0.0, others=900, num_workers=3) == pytest.approx(0.4)


def test_the_fixed_cost_of_a_side_is_learned() -> None:
    costs, now = measured(), 0.0
    for number in range(60):
        costs.sent("local", f"r{number}", 100, now)
        now += 0.6
        costs.first_token("local", f"r{number}", 100, 0.1, now)

    assert costs.seconds("local", 100, now) == pytest.approx(0.6, rel=0.01)


@pytest.mark.parametrize(
    ("others", "num_workers"), [(0, 2), (2000, 1)], ids=["two-workers", "others-send-too"]
)
def test_the_known_cost_of_a_side_is_not_learned_again_as_fixed(
    others: int, num_workers: int
) -> None:
    costs, now = measured(side="remote"), 0.0
    for number in range(60):
        costs.sent("remote", f"r{number}", 100, now, others=others + 400, num_workers=num_workers)
        now += (others + 400) / 1000 / num_workers + 0.1
        costs.first_token("remote", f"r{number}", 100, 0.1, now)

    took = (others + 400) / 1000 / num_workers + 0.1
    assert costs.seconds(
        "remote", 100, now, others=others + 400, num_workers=num_workers
    ) == pytest.approx(took)


def test_a_side_that_is_faster_than_its_rate_is_still_known() -> None:
    costs = measured()
    costs.sent("local", "r", 1000, 0.0)
    costs.first_token("local", "r", 0, None, 0.0)  # all of it was cached

    assert 0 < costs.seconds("local", 50, 0.0) < 0.001


def test_an_unseen_side_gets_a_probe_seldom_and_never_against_a_bar() -> None:
    costs = measured()
    long = OffloadDecision(True, "long")

    def probes(now: float, count: int = PROBE_GAP) -> int:
        return sum(costs.or_probe(long, now).reason == "probe" for _ in range(count))

    assert probes(0.0) == 0
    assert probes(PROBE_SECONDS) == 1
    assert probes(PROBE_SECONDS + 1.0) == 0
    assert probes(2 * PROBE_SECONDS, count=1) == 1
    # few prompts: a probe is a large share of them
    assert probes(3 * PROBE_SECONDS, count=PROBE_GAP // 2) == 0
    assert costs.or_probe(OffloadDecision(False, "transfer"), 9 * PROBE_SECONDS) == OffloadDecision(
        False, "transfer"
    )


def test_a_side_that_was_never_measured_gets_its_first_probes_once_the_other_is_well_known() -> (
    None
):
    costs, short = measured(), OffloadDecision(False, "short")
    assert not any(costs.or_probe(short, 1000.0).is_remote for _ in range(PROBE_GAP))
    for number in range(MANY_SAMPLES):
        costs.first_token("local", str(number), 100, 0.1, 1000.0)
    costs.or_probe(short, 1000.0)

    assert costs.or_probe(short, 1000.0 + PROBE_SECONDS) == OffloadDecision(True, "probe")
