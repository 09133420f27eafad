"""Seconds of steps, and the file that holds them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdcluster_api.errors import StartError
from pdcluster_simulator.simulated_step import SimulatedStep
from pdcluster_simulator.step_model import read_step_model, write_step_model
from tests.simulator.small_clusters import make_times


def test_a_step_is_on_the_line_between_two_points():
    times = make_times(rows=((1, 1.0), (3, 2.0), (11, 4.0)))

    found = [times.of_rows(number) for number in (0, 1, 2, 3, 7, 11, 15, 4011)]
    assert found == pytest.approx([0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 1004.0])


def test_attention_and_samples_add_to_a_step():
    times = make_times(
        rows=((1, 1.0), (3, 1.0)),
        context_seconds=0.5,
        pair_seconds=0.25,
        step_seconds=3.0,
        token_seconds=10.0,
    )

    assert times.seconds(SimulatedStep(3, context=4, pairs=8, samples=2)) == 1 + 2 + 2 + 3 + 20
    assert times.decode_seconds(2, 4.0) == 1 + 2 + 3 + 20


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    times, path = make_times(shared_rates=(1.0, 0.6), kv_tokens=5000), tmp_path / "times.json"
    write_step_model(times, path)

    assert read_step_model(path) == times


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other/2"}, "format is 'other/2': give a file of pdcluster-step-times/1"),
        ({"rows": [[1, 0.1]]}, "rows has 1 points: give two or more"),
        ({"rows": [[4, 0.1], [2, 0.2]]}, "rows has 2 after 4: sort the points by tokens"),
        ({"rows": [[1, 0.0], [2, 0.0]]}, "rows ends with 0 seconds: give measured seconds"),
        ({"rows": [[1, -0.1], [2, 0.2]]}, "Expected `float` >= 0.0 - at `$.rows[0][1]`"),
        ({"kvBytes": 0}, "Expected `float` > 0.0 - at `$.kvBytes`"),
        ({"sharedRates": [1.5]}, "Expected `float` <= 1.0 - at `$.sharedRates[0]`"),
        ({"speed": 3}, "Object contains unknown field `speed`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    path = tmp_path / "times.json"
    write_step_model(make_times(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(StartError) as caught:
        read_step_model(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "bench/step_times.py" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_is_no_json_is_refused(tmp_path: Path):
    path = tmp_path / "times.json"
    path.write_text("rows: 3")

    with pytest.raises(StartError, match=r"is not JSON: .*; make one with"):
        read_step_model(path)
    with pytest.raises(StartError, match="cannot be read: No such file"):
        read_step_model(tmp_path / "none.json")
