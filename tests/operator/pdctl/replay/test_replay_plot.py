"""The picture of a replay: a small PNG, with its figures beside it and latencies against SLOs."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdctl.replay.plot import draw
from pdctl.replay.run import replay
from tests.operator.pdctl.replay.small_replays import SPEEDS, make_spec, steady


@pytest.mark.parametrize("hours", [0.05, 4.0])
def test_picture_is_a_small_png(hours: float, tmp_path: Path):
    spec = make_spec(intervalSeconds=30)
    draw(
        list(replay(spec, steady(6.0, hours * 3600.0), SPEEDS)),
        spec,
        "chat: steady",
        tmp_path / "x.png",
    )
    content = (tmp_path / "x.png").read_bytes()

    assert content.startswith(b"\x89PNG\r\n")
    assert 5_000 < len(content) < 100_000
    figures = json.loads((tmp_path / "x.png.json").read_text())
    assert len(figures["decode/x ready"]) == len(figures["seconds"]) == hours * 120


@pytest.mark.parametrize(
    ("slo", "text"),
    [
        ({}, "SLO: 0.5 s"),
        ({"ttftMilliseconds": 60_000, "tpotMilliseconds": 40}, "0.0% of the requests came"),
        ({"ttftMilliseconds": 1, "tpotMilliseconds": 1}, "100.0% of the requests came"),
    ],
)
def test_latencies_are_drawn_against_their_slos(slo, text, tmp_path: Path):
    spec = make_spec(intervalSeconds=30, qos={"slo": slo})
    draw(list(replay(spec, steady(1.0, 600.0), SPEEDS)), spec, "chat", tmp_path / "x.svg")
    shown = " ".join(ElementTree.parse(tmp_path / "x.svg").getroot().itertext())

    assert text in shown
    assert ("SLO: 40 ms" in shown) == (slo.get("tpotMilliseconds") == 40)
