"""Plots of measurements: what they mark, and the same figures as JSON beside them."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pdctl.bench.load import LatencyLimits, LoadResult, RequestResult
from pdctl.bench.plot import draw_batches, draw_latencies, draw_trials
from pdctl.bench.tuning import (
    CompletedTrial,
    LatencyTargets,
    SearchResult,
    Sizes,
    Trial,
    TrialResult,
    front,
)

GOOD = [RequestResult(0.0, 0.0, (0.1 * n, 0.1 * n + 0.02), 2) for n in range(1, 11)]
FAILED = RequestResult(1.0, 1.0, (), 0, "HTTP 503")


def texts(path: Path) -> str:
    """All text of an SVG picture, and what was written beside it."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{path}.json").read_text())
    return found


def test_latencies_mark_percentiles_and_slo(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.svg"
    run = LoadResult((*GOOD, FAILED), 2.0, 0.0)
    draw_latencies(path, "A & B", run, LatencyLimits(ttft_seconds=0.5))

    shown, found = texts(path), figures(path)
    for text in ("A & B", "p50: 550 ms", "p90: 910 ms", "p99: 991 ms", "SLO: 500 ms"):
        assert text in shown
    assert "Time to First Token: 50.0% within the SLO of 500 ms" in shown
    assert (found["title"], found["failed"], len(found["ttft"]["values_ms"])) == ("A & B", 1, 10)
    assert found["ttft"]["within_slo_ratio"] == 0.5
    assert found["itl"]["p99_ms"] == pytest.approx(20)


def test_end_to_end_latency_is_drawn_where_it_has_an_slo(tmp_path: Path) -> None:
    run = LoadResult(tuple(GOOD), 2.0, 0.0)
    draw_latencies(tmp_path / "a.svg", "a", run)
    draw_latencies(tmp_path / "b.svg", "b", run, LatencyLimits(e2e_seconds=1.0))

    assert "e2el" not in figures(tmp_path / "a.svg")
    assert "SLO: 1000 ms" in texts(tmp_path / "b.svg")


def test_load_without_an_answer_says_so(tmp_path: Path) -> None:
    draw_latencies(tmp_path / "a.svg", "a", LoadResult((FAILED,), 1.0, 0.0))

    assert "No answer was complete" in texts(tmp_path / "a.svg")
    assert figures(tmp_path / "a.svg") == {"title": "a", "failed": 1}


def test_batches_mark_percentiles(tmp_path: Path) -> None:
    draw_batches(tmp_path / "a.svg", "a", [1.0, 2.0, 3.0])

    assert "p50: 2 s" in texts(tmp_path / "a.svg")
    assert figures(tmp_path / "a.svg")["p90_seconds"] == pytest.approx(2.8)


def test_the_same_plot_is_drawn_twice_alike(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_batches(tmp_path / name, "a", [1.0, 2.0])

    pictures = {(tmp_path / name).read_bytes() for name in ("a.png", "b.png")}
    assert len(pictures) == 1
    assert pictures.pop().startswith(b"\x89PNG")


def trial(rate: float, ttft: float, itl: float, num_failed: int = 0) -> CompletedTrial:
    return CompletedTrial(Trial(Sizes(256, 64), rate), TrialResult(ttft, itl, num_failed))


SLOW, FAST, BEST = trial(1.0, 100.0, 20.0), trial(2.0, 90.0, 30.0), trial(3.0, 200.0, 40.0)
BROKEN, ABSENT = trial(9.0, 1.0, 1.0, num_failed=1), trial(4.0, math.inf, math.inf, num_failed=8)
TRIED = (SLOW, FAST, BEST, BROKEN, ABSENT)


def test_front_has_trials_that_none_beats_in_rate_and_latency() -> None:
    assert front(TRIED) == {
        SLOW: ("ITL",),
        FAST: ("TTFT", "ITL"),
        BEST: ("TTFT", "ITL"),
        BROKEN: (),
        ABSENT: (),
    }
    assert front([FAST, trial(2.0, 90.0, 30.0)])[FAST] == ("TTFT", "ITL")  # equals beat no equal


def test_trials_show_their_front_best_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw_trials(path, "a", SearchResult(BEST, TRIED), LatencyTargets(250.0, 100.0))

    for text in ("front", "best", "continuous", "limit: 250 ms", "limit: 100 ms", "requests/s"):
        assert text in texts(path)
    trials = figures(path)["trials"]
    assert [one["front_of"] for one in trials] == [list(names) for names in front(TRIED).values()]
    assert (trials[0]["maxBatchedTokens"], trials[-1]["ttft_p90_ms"]) == (256, None)


def test_trials_without_a_best_one_are_drawn_too(tmp_path: Path) -> None:
    orca = CompletedTrial(Trial(Sizes(256, 64, "orca"), 1.0), TrialResult(900.0, 80.0))
    draw_trials(tmp_path / "a.svg", "a", SearchResult(None, [orca]), LatencyTargets(1.0, 1.0))

    assert "orca" in texts(tmp_path / "a.svg")
    assert "best" not in texts(tmp_path / "a.svg")
