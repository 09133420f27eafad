"""Traces: what is read, and bounds; the faults of one are in tests/golden/operator."""

from pathlib import Path

import pytest

from pdcluster_api.errors import InvalidTraceError
from pdctl.replay import trace as module
from pdctl.replay.trace import Trace, TraceLoad, read_trace

HEADER = "seconds,requests_per_second,input_tokens,output_tokens\n"
GOOD = HEADER + "100,2,1000,50\n160,4,500,100\n"


def read(folder: Path, text: str | bytes) -> Trace:
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


def faults(folder: Path, text: str | bytes) -> list[str]:
    with pytest.raises(InvalidTraceError) as caught:
        read(folder, text)
    return [str(fault) for fault in caught.value.faults]


def test_trace_begins_at_zero_and_its_last_row_lasts_as_long_as_the_one_before(tmp_path: Path):
    found = read(tmp_path, GOOD)

    assert found.loads == (TraceLoad(0.0, 2.0, 1000.0, 50.0), TraceLoad(60.0, 4.0, 500.0, 100.0))
    assert found.duration_seconds == 120.0


def test_columns_may_stand_in_any_order_with_others_and_blank_lines_between(tmp_path: Path):
    text = (
        "\ufeffnote, output_tokens "
        ",input_tokens,requests_per_second,seconds\nx,50,1000,2,100\n\n,100,500,4,160\n"
    )

    assert read(tmp_path, text) == read(tmp_path, GOOD)


def test_intervals_are_means_by_the_requests_that_arrive():
    trace = Trace((TraceLoad(0.0, 1.0, 100.0, 10.0), TraceLoad(5.0, 3.0, 200.0, 30.0)))

    assert list(trace.every(10.0)) == [TraceLoad(0.0, 2.0, 175.0, 25.0)]
    assert [load.requests_per_second for load in trace.every(4.0)] == [1.0, 2.5, 3.0]


def test_an_interval_without_requests_is_empty():
    assert list(
        Trace((TraceLoad(0.0, 0.0, 9.0, 9.0), TraceLoad(5.0, 0.0, 9.0, 9.0))).every(10.0)
    ) == [TraceLoad(0.0, 0.0, 0.0, 0.0)]


def test_no_more_faults_come_than_a_screenful(tmp_path: Path):
    assert len(faults(tmp_path, HEADER + "a,b,c,d\n" * 50)) == 20


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ROWS", 2)

    assert faults(tmp_path, GOOD + "220,1,1,1\n") == [
        "line 4: a trace holds at most 2 rows; take the mean of several rows"
    ]
