"""The correction of step times by real runs: it finds what the runs were made with."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated import NAMES, Run, corrected, fitted, median_errors, simulated, table

from pdcluster_simulator.step_model import StepModel
from pdctl.bench.load import BenchRequest
from tests.simulator.small_clusters import make_times

EXAMPLES = Path(__file__).parents[2] / "examples"
TRUE = {"steps": 1.2, "two": 0.85, "more": 0.7}


@pytest.fixture
def times() -> StepModel:
    return make_times(gpu="cpu", model="smollm2-135m-instruct", shared_rates=(1.0, 1.0))


@pytest.fixture
def runs(times: StepModel) -> list[Run]:
    """As `times` would give them with another correction."""
    requests = [BenchRequest([1] * (40 + 90 * (number % 5)), 8) for number in range(24)]
    found = []
    for file in ("chat.yaml", "two-by-two.yaml", "mixed.yaml"):
        arrivals = [0.06 * number for number in range(len(requests))]
        run = Run(file, 16.0, EXAMPLES / file, requests, arrivals, (1.0,) * len(NAMES))
        measured = simulated(run, corrected(times, **TRUE))
        found.append(replace(run, measured=measured))
    return found


def test_a_correction_is_found_again(times: StepModel, runs: list[Run]):
    found = fitted(times, runs)
    better = median_errors(runs, corrected(times, **found))

    assert found["steps"] == pytest.approx(TRUE["steps"], abs=0.11)
    assert max(better.values()) < 0.5 * max(median_errors(runs, times).values())
    assert set(median_errors(runs, corrected(times, **TRUE)).values()) == {0.0}


def test_a_row_holds_measured_and_simulated(times: StepModel, runs: list[Run]):
    lines = table(runs, corrected(times, **TRUE))
    run = runs[0]

    assert lines[0].startswith("Median absolute error over 3 loads: TTFT mean 0%")
    cells = " | ".join(f"{real:.0f} / {real:.0f} (+0%)" for real in run.measured)
    assert f"| chat.yaml | 16 | {cells} |" in lines
