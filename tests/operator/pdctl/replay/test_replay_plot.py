"""The picture of a replay: a small PNG, and what is said without the library."""

from pathlib import Path

import pytest

from pdctl.replay.plot import draw
from pdctl.replay.run import replay
from tests.operator.pdctl.replay.small_replays import SPEEDS, make_spec, steady


@pytest.mark.parametrize("hours", [0.05, 4.0])
def test_picture_is_a_small_png(hours: float, tmp_path: Path):
    spec = make_spec(intervalSeconds=30)
    draw(
        list(replay(spec, steady(6.0, hours * 3600.0), SPEEDS)),
        spec.autoscale,
        "chat: steady",
        tmp_path / "x.png",
    )
    content = (tmp_path / "x.png").read_bytes()

    assert content.startswith(b"\x89PNG\r\n")
    assert 5_000 < len(content) < 100_000
