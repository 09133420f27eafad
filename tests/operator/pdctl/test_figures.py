"""The style of plots: what is refused before anything is measured."""

import doctest
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdcluster_api.errors import StartError
from pdctl import figures


def test_examples_hold() -> None:
    assert doctest.testmod(figures).failed == 0


@pytest.mark.parametrize("name", ["a", "a.pdf", "a.json"])
def test_a_name_that_is_no_picture_is_refused(name: str) -> None:
    with pytest.raises(StartError, match=r"give a name that ends with \.png or \.svg"):
        figures.check_name(Path(name))


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)

    with pytest.raises(StartError, match="pip install matplotlib, or go without --plot"):
        figures.require_matplotlib("go without --plot")


def test_curves_are_named_and_written_as_figures(tmp_path: Path) -> None:
    curve = figures.distribution("sarathi", [3.0, 1.0])
    path = tmp_path / "a.svg"
    figures.draw_curves(path, "A & B", [figures.Panel("Gaps", "milliseconds", "%", [curve])])

    shown = " ".join(ElementTree.parse(path).getroot().itertext())
    for text in ("A & B", "Gaps", "milliseconds", "sarathi"):
        assert text in shown
    assert json.loads(Path(f"{path}.json").read_text()) == {
        "title": "A & B",
        "Gaps": {"sarathi": [[1.0, 50.0], [3.0, 100.0]]},
    }
