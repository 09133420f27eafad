"""The generator of traces: what is shipped is what it makes."""

from pathlib import Path

import make_traces
import pytest

from pdcluster_api.traces.loads import read_loads

SHIPPED = Path(__file__).parents[2] / "examples" / "traces"


def test_shipped_traces_are_the_generators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_traces.main([str(tmp_path)]) == 0
    assert "3 traces in" in capsys.readouterr().out

    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in SHIPPED.glob("*.csv")}
    assert set(made) == {f"{name}.csv" for name in make_traces.TRACES}
    assert all(len(content) < 20_000 for content in made.values())


@pytest.mark.parametrize(
    ("name", "hours"), [("day-curve", 24), ("step-burst", 2), ("prompt-to-output-heavy", 3)]
)
def test_shipped_traces_can_be_read(name: str, hours: int):
    assert read_loads(SHIPPED / f"{name}.csv")[-1].end == hours * 3600
