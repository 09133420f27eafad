"""Traces of load: what is read and drawn; the faults of one are in tests/golden/operator."""

from pathlib import Path

import pytest

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces import loads as module
from pdcluster_api.traces.loads import LoadInterval, drawn_requests, read_loads

HEADER = "seconds,requests_per_second,input_tokens,output_tokens\n"
GOOD = HEADER + "100,2,1000,50\n160,4,500,100\n"


def read(folder: Path, text: str) -> list[LoadInterval]:
    path = folder / "trace.csv"
    path.write_bytes(text.encode())
    return read_loads(path)


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(InvalidTraceError) as caught:
        read(folder, text)
    return [str(fault) for fault in caught.value.faults]


def test_trace_begins_at_zero_and_its_last_row_lasts_as_long_as_the_one_before(tmp_path: Path):
    assert read(tmp_path, GOOD) == [
        LoadInterval(0.0, 2.0, 1000.0, 50.0, 60.0),
        LoadInterval(60.0, 4.0, 500.0, 100.0, 120.0),
    ]


def test_columns_may_stand_in_any_order_with_others_and_blank_lines_between(tmp_path: Path):
    text = (
        "\ufeffnote, output_tokens "
        ",input_tokens,requests_per_second,seconds\nx,50,1000,2,100\n\n,100,500,4,160\n"
    )

    assert read(tmp_path, text) == read(tmp_path, GOOD)


def test_no_more_faults_come_than_a_screenful(tmp_path: Path):
    assert len(faults(tmp_path, HEADER + "a,b,c,d\n" * 50)) == 20


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ROWS", 2)

    assert faults(tmp_path, GOOD + "220,1,1,1\n") == [
        "line 4: a trace holds at most 2 rows; take the mean of several rows"
    ]


def test_milliseconds_are_refused_where_they_are_more_than_a_year(tmp_path: Path):
    year = 366 * 86400
    assert read(tmp_path, HEADER + f"100,1,1,1\n{100 + year},1,1,1\n")
    assert faults(tmp_path, HEADER + "0,1,1,1\n60000,1,1,1\n86400000,1,1,1\n") == [
        "line 4, column seconds: is 8.64e+07 s after the first row, over 3.16224e+07 s; "
        "give it in seconds, not milliseconds, or cut the trace"
    ]


def test_requests_are_drawn_at_the_rates_of_a_load():
    loads = [
        LoadInterval(0.0, 20.0, 64.4, 5.0, 100.0),
        LoadInterval(100.0, 0.0, 1.0, 1.0, 200.0),
    ]
    trace, again = (drawn_requests(loads, "a") for _ in range(2))

    assert trace == again != drawn_requests(loads, "b")
    assert len(trace.requests) == pytest.approx(2000, abs=200)
    assert all(0.0 < each.seconds < 100.0 for each in trace.requests)
    assert {(each.input_tokens, each.output_tokens) for each in trace.requests} == {(64, 5)}
    assert (trace.ends, trace.seconds) == ((100.0, 200.0), 200.0)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (1e3, "at most 50000000 are simulated; cut the trace"),
        (0.0, "has no request; raise requests_per_second"),
    ],
)
def test_too_many_requests_and_none_are_refused(rate: float, message: str):
    with pytest.raises(InvalidTraceError, match=message):
        drawn_requests([LoadInterval(0.0, rate, 1.0, 1.0, 1e6)], "a")
