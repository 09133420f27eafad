"""The search for a capacity and what decides it; loads run on the real engine and
need the model.
"""

import doctest
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import capacity as capacity_module
import capacity_search
import pytest
from capacity_search import LADDER, Bounds, Capacity, LostWatch, Probe, Slo, probe_of, search
from schedulers import VARIANTS
from schedulers_load import LOAD, Answers, TimedRequest, timed_requests

from pdcluster_worker.messages.requests import Token

SLO = Slo("strict", 0.1)
DUE = timed_requests(LOAD, 4, 1.0, "s")


def bounds(num_probes: int = 5, times: Iterator[float] | None = None) -> Bounds:
    return Bounds(num_probes, 10.0, (lambda: 0.0) if times is None else times.__next__)


def probe_up_to(capacity: float, looked_at: list[float]) -> Callable[[float], Probe]:
    def probe(rate: float) -> Probe:
        looked_at.append(rate)
        return Probe(rate, 0.05 if rate <= capacity else 0.5, 0.0)

    return probe


def answers_at(due: list[TimedRequest], gap: float, delay: float, num_ended: int) -> Answers:
    """Answers to requests that each have three tokens; so many of them have ended."""
    answers = Answers({one.spec.request_id: one.seconds for one in due})
    for number, one in enumerate(due):
        name, begin = one.spec.request_id, one.seconds + delay
        reason = "length" if number < num_ended else None
        answers.take([Token(name, 1, queue_seconds=delay)], begin)
        answers.take([Token(name, 1)], begin + gap)
        answers.take([Token(name, 1, finish_reason=reason)], begin + 2 * gap)
    return answers


def test_documented_examples_hold() -> None:
    assert doctest.testmod(capacity_search).failed == 0


def test_every_scheduler_of_the_comparison_is_a_variant() -> None:
    assert set(capacity_module.NAMES) <= set(VARIANTS)


@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.3, 4.0, 9.0])
def test_search_finds_the_highest_rate_that_holds(capacity: float) -> None:
    looked_at: list[float] = []

    found = search(SLO, probe_up_to(capacity, looked_at), {}, bounds())

    assert found.rate == max((rate for rate in LADDER if rate <= capacity), default=0.0)
    assert found.above == min((rate for rate in LADDER if rate > capacity), default=None)
    assert found.is_exact
    assert len(looked_at) <= 5


def test_search_goes_on_from_what_was_seen_for_a_looser_slo() -> None:
    looked_at: list[float] = []
    seen = {rate: Probe(rate, 0.05, 0.0) for rate in LADDER[:12]} | {
        LADDER[14]: Probe(LADDER[14], 0.2, 0.0)
    }

    found = search(SLO, probe_up_to(LADDER[12], looked_at), seen, bounds())

    assert found == Capacity(LADDER[12], LADDER[13], is_exact=True)
    assert looked_at == LADDER[12:14]


def test_search_stops_at_its_probes_and_at_its_deadline() -> None:
    looked_at: list[float] = []
    few = search(SLO, probe_up_to(1.3, looked_at), {}, bounds(num_probes=2))
    late = search(SLO, probe_up_to(1.3, looked_at), {}, bounds(times=iter([0.0, 10.0])))

    assert len(looked_at) == 3
    assert (few.is_exact, late.is_exact) == (False, False)
    assert few.rate <= 1.3 < (few.above or 0.0)
    assert late.above == 2.0


@pytest.mark.parametrize(
    ("gap", "delay", "holds"), [(0.05, 0.5, True), (0.2, 0.5, False), (0.05, 2.5, False)]
)
def test_a_rate_holds_inside_the_slo_while_the_queue_does_not_grow(
    gap: float, delay: float, holds: bool
) -> None:
    answers = answers_at(DUE, gap, delay, num_ended=4)

    probe = probe_of(1.0, DUE, answers, now=99.0)

    assert (probe.tbt_seconds, probe.delay_seconds) == pytest.approx((gap, delay))
    assert probe.holds(SLO) is holds


def test_a_load_that_was_ended_early_holds_nothing() -> None:
    answers = answers_at(DUE, 0.05, 0.5, num_ended=3)

    assert not probe_of(1.0, DUE, answers, now=99.0).holds(SLO)


def test_a_load_is_ended_when_its_slo_is_lost() -> None:
    long_gaps, watch = answers_at(DUE, 0.2, 0.0, num_ended=1), LostWatch(DUE, SLO)

    assert watch(long_gaps, 5.0)
    assert not watch(long_gaps, 6.0), "looked again though no request has ended since"
    assert not LostWatch(DUE, SLO)(answers_at(DUE, 0.05, 0.0, num_ended=1), 5.0)


def test_a_load_is_ended_when_most_of_its_later_requests_wait() -> None:
    due = timed_requests(LOAD, 8, 4.0, "s")
    answers = Answers({one.spec.request_id: one.seconds for one in due})
    answers.take([Token(due[0].spec.request_id, 1, finish_reason="length", queue_seconds=0.0)], 0.1)

    assert not LostWatch(due, SLO)(answers, 2.0)
    assert LostWatch(due, SLO)(answers, 20.0)


def test_a_plot_has_a_bar_for_each_scheduler_and_slo(tmp_path: Path) -> None:
    rows = {
        name: capacity_module.Row([Capacity(rate, None, is_exact=True) for rate in rates])
        for name, rates in (("sarathi", (1.25, 2.5)), ("own", (3.5, 4.5)))
    }
    path = tmp_path / "capacity.svg"
    capacity_module.plot([SLO, Slo("relaxed", 0.5)], rows, path)

    texts = re.findall("<text [^>]*>([^<]*)</text>", path.read_text())
    assert {"1.25", "2.5", "3.5", "4.5", "Sarathi-Serve", "own"} <= set(texts)
    assert json.loads(path.with_name("capacity.svg.json").read_text()) == {
        "title": "Capacity at an SLO for gaps between tokens",
        "slos": ["strict: p99 of gaps at most 100 ms", "relaxed: p99 of gaps at most 500 ms"],
        "requests_per_second": {"sarathi": [1.25, 2.5], "own": [3.5, 4.5]},
    }
