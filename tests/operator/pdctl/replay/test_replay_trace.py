"""Traces: what is read, and every way in which one can be wrong."""

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


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            "x,1,1,1",
            "line 4, column seconds: must be a number, not 'x'; write a number from 0 on, such as "
            "12.5",
        ),
        (
            "220,-1,1,1",
            "line 4, column requests_per_second: must not be negative, not -1; write a number from "
            "0 on, such as 12.5",
        ),
        (
            "220,1,NaN,1",
            "line 4, column input_tokens: must be a finite number, not NaN; write a number from 0 "
            "on, such as 12.5",
        ),
        (
            "220,1,1,inf",
            "line 4, column output_tokens: must be a finite number, not inf; write a number from 0 "
            "on, such as 12.5",
        ),
        (
            "220,1,1,",
            "line 4, column output_tokens: is empty; write a number from 0 on, such as 12.5",
        ),
        (
            "220,1,1",
            "line 4, column output_tokens: is empty; write a number from 0 on, such as 12.5",
        ),
        (
            "220,1e13,1,1",
            "line 4, column requests_per_second: must be at most 1e+12, not 1e13; write a number "
            "from 0 on, such as 12.5",
        ),
        (
            "160,1,1,1",
            "line 4, column seconds: must be more than 160 of the row before, not 160; sort the "
            "rows by time, and give each time once",
        ),
        (
            "90,1,1,1",
            "line 4, column seconds: must be more than 160 of the row before, not 90; sort the "
            "rows by time, and give each time once",
        ),
    ],
)
def test_wrong_row_is_named_by_line_and_column(tmp_path: Path, row: str, fault: str):
    assert faults(tmp_path, GOOD + row + "\n280,1,1,1\n") == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "",
            "is empty; write the line seconds,requests_per_second,input_tokens,output_tokens and "
            "two rows or more",
        ),
        (
            HEADER,
            "needs two rows or more, not 0: the last lasts as long as the one before it; add rows "
            "below the line of names",
        ),
        (
            HEADER + "0,1,1,1\n",
            "needs two rows or more, not 1: the last lasts as long as the one before it; add rows "
            "below the line of names",
        ),
        (
            "seconds,requests_per_second,input_tokens\n0,1,1\n",
            "line 1, column output_tokens: is missing; there are seconds, requests_per_second, "
            "input_tokens; "
            "name the columns seconds, requests_per_second, input_tokens, output_tokens",
        ),
        (
            HEADER.replace(",", ";") + "0;4,5;1500;500\n",
            "line 1: has its names separated by semicolons; separate names and values by commas: "
            "seconds,requests_per_second,input_tokens,output_tokens",
        ),
        (
            HEADER.replace(",", "\t") + "0\t4\t1500\t500\n",
            "line 1: has its names separated by tabs; separate names and values by commas: "
            "seconds,requests_per_second,input_tokens,output_tokens",
        ),
        (
            HEADER.replace("\n", ",seconds\n"),
            "line 1, column seconds: is given twice; keep one of them",
        ),
        (b"\xff\xfe", "is not UTF-8 text; save it as CSV in UTF-8"),
        (
            HEADER + '0,"1"x,1,1\n',
            "line 2: is not CSV: ',' expected after '\"'; separate the values by commas",
        ),
    ],
)
def test_wrong_file_says_how_to_write_one(tmp_path: Path, text: str | bytes, fault: str):
    assert faults(tmp_path, text) == [fault]


def test_a_decimal_comma_is_refused_and_not_read_as_another_column(tmp_path: Path):
    assert faults(tmp_path, HEADER + "0,4,5,1500,500\n60,4,1500,500\n") == [
        "line 2: has 5 values, and line 1 has 4 names; write decimals with a point, as in 12.5, "
        "and put text that holds a comma in quotes"
    ]


def test_lines_are_those_of_the_file_where_quotes_hold_line_breaks(tmp_path: Path):
    text = "note," + HEADER + '"two\nlines",100,2,1000,50\n"a\nb",160,x,500,100\n,220,y,1,1\n'

    assert [each.partition(":")[0] for each in faults(tmp_path, text)] == [
        "line 4, column requests_per_second",
        "line 6, column requests_per_second",
    ]


def test_every_missing_column_is_named(tmp_path: Path):
    found = faults(tmp_path, "time,rate\n1,2\n")

    assert [each.partition(":")[0] for each in found] == [
        f"line 1, column {name}" for name in module.COLUMNS
    ]


def test_all_faults_come_at_once_and_no_more_than_a_screenful(tmp_path: Path):
    assert len(faults(tmp_path, GOOD + "x,y,1,1\n220,1,1,z\n")) == 3
    assert len(faults(tmp_path, HEADER + "a,b,c,d\n" * 50)) == 20


def test_a_file_that_is_not_there_is_a_fault(tmp_path: Path):
    with pytest.raises(
        InvalidTraceError,
        match="cannot be read: No such file or directory; give the path of a CSV file",
    ):
        read_trace(tmp_path / "none.csv")


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ROWS", 2)

    assert faults(tmp_path, GOOD + "220,1,1,1\n") == [
        "line 4: a trace holds at most 2 rows; take the mean of several rows"
    ]
