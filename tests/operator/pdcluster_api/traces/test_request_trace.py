"""Traces of requests: read whole, or refused with every line that is wrong."""

import json
from pathlib import Path

import pytest

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces.requests import read_requests

ROW = {"timestamp": 1000, "input_length": 40, "output_length": 5}


def written(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_requests_begin_at_second_0(tmp_path: Path):
    later = {**ROW, "timestamp": 2500, "hash_ids": [7, 8, 9], "priority": 100}
    trace = read_requests(written(tmp_path, {**ROW, "hash_ids": [7, 1, 2]}, "", later), 16)
    first, second = trace.requests

    assert (first.seconds, first.input_tokens, first.output_tokens) == (0.0, 40, 5)
    assert (second.seconds, second.priority) == (1.5, 100)
    assert trace.has_priorities
    assert (trace.block_tokens, second.hash_ids) == (16, (7, 8, 9))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "holds no request; write a line of JSON for each request"),
        (("{",), "line 1: is not JSON: .*; write one object in each line"),
        (("[]",), "line 1: is no object; write"),
        (("[" * 100_000,), "line 1: is nested too deep; write one object in each line"),
        (
            ({"timestamp": 0, "input_length": 4},),
            "line 1, output_length: is missing; write timestamp, input_length, output_length",
        ),
        (
            ({**ROW, "input_length": -3},),
            "line 1, input_length: must not be -3; write a finite number from 1 on",
        ),
        (({**ROW, "output_length": 0},), "line 1, output_length: must not be 0; write a finite"),
        (({**ROW, "input_length": 2.5},), "line 1, input_length: must be a whole number, not 2.5"),
        (({**ROW, "timestamp": "now"},), "line 1, timestamp: must be a whole number, not 'now'"),
        (({**ROW, "input_length": float("nan")},), "input_length: must not be nan; write a finite"),
        (({**ROW, "output_length": float("inf")},), "output_length: must not be inf; write"),
        (({**ROW, "timestamp": 10**400},), r"timestamp: must be at most 1e\+18 ms; give"),
        (
            (ROW, {**ROW, "timestamp": 4e13}),
            r"line 2, timestamp: is 4e\+10 s after the first request, over 3.16224e\+07 s; give it "
            "in milliseconds, or cut the trace",
        ),
        (({**ROW, "hash_ids": None},), "hash_ids: must be a list of whole numbers"),
        (('{"timestamp": NaN, "input_length": 1, "output_length": 1}',), "must not be nan"),
        (
            ({**ROW, "input_length": 10**8},),
            "input_length: must be at most 10000000 tokens, not 100000000; shorten it",
        ),
        (
            (ROW, {**ROW, "timestamp": 400}),
            "line 2, timestamp: is 400, before the 1000 of the request above; sort the requests",
        ),
        (
            ({**ROW, "hash_ids": [1]},),
            "hash_ids: has 1 ids, and 40 tokens in blocks of 16 are 3; give the trace's own block "
            "length with --trace-block-tokens",
        ),
        (({**ROW, "hash_ids": "abc"},), "hash_ids: must be a list of whole numbers"),
        (({**ROW, "priority": 5000},), "priority: must not be 5000; write a whole number from"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, rows: tuple[object, ...], message: str):
    with pytest.raises(InvalidTraceError, match=message):
        read_requests(written(tmp_path, *rows), 16)


def test_every_wrong_line_is_named_up_to_20(tmp_path: Path):
    with pytest.raises(InvalidTraceError) as caught:
        read_requests(written(tmp_path, *({**ROW, "input_length": 0} for _ in range(30))), 16)

    assert [fault.path for fault in caught.value.faults] == [
        f"line {number}, input_length" for number in range(1, 21)
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InvalidTraceError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none.jsonl")
