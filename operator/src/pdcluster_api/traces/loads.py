"""A trace of load from a CSV file, and requests that are drawn from it.

The columns, in any order, further ones ignored:
    seconds              when the row begins; the first row is second 0
    requests_per_second  that arrive
    input_tokens         of a request's prompt
    output_tokens        of a request's answer
A row holds until the next one begins, the last as long as the one before it.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces.requests import MAX_SECONDS, LoadTrace, TraceRequest
from pdcluster_schema.faults import Fault

COLUMNS = ("seconds", "requests_per_second", "input_tokens", "output_tokens")
MAX_ROWS = 1_000_000
MAX_REQUESTS = 50_000_000
MAX_NUMBER = 1e12
_MAX_FAULTS = 20
_WHOLE_FILE = ""
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True, slots=True)
class LoadInterval:
    """Requests of one length that arrive at one rate.  end: where the next row begins"""

    seconds: float
    requests_per_second: float
    input_tokens: float
    output_tokens: float
    end: float = 0.0

    @property
    def num_requests(self) -> float:
        return self.requests_per_second * (self.end - self.seconds)


def drawn_requests(intervals: Sequence[LoadInterval], seed: str) -> LoadTrace:
    """Poisson arrivals of each interval, with its lengths.  Raises InvalidTraceError."""
    expected = sum(each.num_requests for each in intervals)
    if expected > MAX_REQUESTS:
        reason = f"has {expected:.0f} requests: at most {MAX_REQUESTS} are simulated"
        raise InvalidTraceError([Fault(_WHOLE_FILE, reason, "cut the trace, or lower its rates")])
    source = Random(f"arrivals {seed}")
    found: list[TraceRequest] = []
    for interval in intervals:
        if interval.requests_per_second <= 0.0:
            continue
        at, end = interval.seconds, interval.end
        sizes = max(1, round(interval.input_tokens)), max(1, round(interval.output_tokens))
        while (at := at + source.expovariate(interval.requests_per_second)) < end:
            found.append(TraceRequest(at, *sizes))
    if not found:
        fix = "raise requests_per_second, or the time between the rows"
        raise InvalidTraceError([Fault(_WHOLE_FILE, "has no request", fix)])
    return LoadTrace(found, ends=tuple(each.end for each in intervals))


def read_loads(path: Path) -> list[LoadInterval]:
    """Raises InvalidTraceError with every fault (the first 20 of many)."""
    rows = _read_rows(path)
    if not rows:
        fix = f"write the line {','.join(COLUMNS)} and two rows or more"
        raise InvalidTraceError([Fault(_WHOLE_FILE, "is empty", fix)])
    header = [name.strip() for name in rows[0][1]]
    places = _places(header)
    loads: list[LoadInterval] = []
    faults: list[Fault] = []
    for line, cells in rows[1:]:
        numbers, wrong = _row(line, cells, places, len(header))
        if not wrong and loads:
            wrong = _time_faults(line, numbers["seconds"], loads[-1].seconds, loads[0].seconds)
        faults += wrong
        if not wrong:
            loads.append(LoadInterval(**numbers))
        if len(faults) >= _MAX_FAULTS or len(loads) > MAX_ROWS:
            break
    faults += _wrong_length(loads) if not faults or len(loads) > MAX_ROWS else []
    if faults:
        raise InvalidTraceError(faults[:_MAX_FAULTS])
    start = loads[0].seconds
    times = [load.seconds - start for load in loads]
    times.append(2.0 * times[-1] - times[-2])
    return [
        replace(load, seconds=begin, end=end)
        for load, (begin, end) in zip(loads, pairwise(times), strict=True)
    ]


def _time_faults(line: int, seconds: float, before: float, first: float) -> list[Fault]:
    """before, first: of the row before, and of the first one."""
    place = f"line {line}, column seconds"
    if seconds <= before:
        reason = f"must be more than {before:g} of the row before, not {seconds:g}"
        return [Fault(place, reason, "sort the rows by time, and give each time once")]
    if seconds - first > MAX_SECONDS:
        reason = f"is {seconds - first:g} s after the first row, over {MAX_SECONDS:g} s"
        return [Fault(place, reason, "give it in seconds, not milliseconds, or cut the trace")]
    return []


def _read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Each row that is not blank, with the line on which it begins: it may hold line breaks."""
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            try:
                for cells in reader:
                    if any(cell.strip() for cell in cells) or not rows:
                        rows.append((line, cells))
                    line = reader.line_num + 1
            except csv.Error as e:
                place, fix = f"line {reader.line_num}", "separate the values by commas"
                raise InvalidTraceError([Fault(place, f"is not CSV: {e}", fix)]) from e
    except OSError as e:
        reason = f"cannot be read: {e.strerror or e}"
        raise InvalidTraceError([Fault(_WHOLE_FILE, reason, "give the path of a CSV file")]) from e
    except UnicodeDecodeError as e:
        fault = Fault(_WHOLE_FILE, "is not UTF-8 text", "save it as CSV in UTF-8")
        raise InvalidTraceError([fault]) from e
    return rows


def _wrong_length(loads: Sequence[LoadInterval]) -> list[Fault]:
    if len(loads) > MAX_ROWS:
        reason, fix = f"a trace holds at most {MAX_ROWS} rows", "take the mean of several rows"
        return [Fault(f"line {MAX_ROWS + 2}", reason, fix)]
    if len(loads) < 2:
        last = "the last lasts as long as the one before it"
        reason, fix = f"needs two rows or more, not {len(loads)}: {last}", "add rows below the line"
        return [Fault(_WHOLE_FILE, reason, f"{fix} of names")]
    return []


def _places(header: Sequence[str]) -> Mapping[str, int]:
    """Raises InvalidTraceError."""
    separator = next((each for each in _SEPARATORS if each in header[0]), None)
    if len(header) == 1 and separator:
        reason = f"has its names separated by {_SEPARATORS[separator]}"
        fix = f"separate names and values by commas: {','.join(COLUMNS)}"
        raise InvalidTraceError([Fault("line 1", reason, fix)])
    found, fix = ", ".join(header) or "nothing", f"name the columns {', '.join(COLUMNS)}"
    missing = [
        Fault(f"line 1, column {name}", f"is missing; there are {found}", fix)
        for name in COLUMNS
        if name not in header
    ]
    repeated = [
        Fault(f"line 1, column {name}", "is given twice", "keep one of them")
        for name in COLUMNS
        if header.count(name) > 1
    ]
    if missing or repeated:
        raise InvalidTraceError(missing or repeated)
    return {name: header.index(name) for name in COLUMNS}


def _row(
    line: int, cells: Sequence[str], places: Mapping[str, int], num_names: int
) -> tuple[dict[str, float], list[Fault]]:
    if len(cells) > num_names:
        reason = f"has {len(cells)} values, and line 1 has {num_names} names"
        fix = "write decimals with a point, as in 12.5, and put text that holds a comma in quotes"
        return {}, [Fault(f"line {line}", reason, fix)]
    numbers: dict[str, float] = {}
    faults = []
    for name, place in places.items():
        text = cells[place].strip() if place < len(cells) else ""
        if wrong := _wrong(text):
            fix = "write a number from 0 on, such as 12.5"
            faults.append(Fault(f"line {line}, column {name}", wrong, fix))
        else:
            numbers[name] = float(text)
    return numbers, faults


def _wrong(text: str) -> str | None:
    """Reason why a cell is not valid; None = it is."""
    if not text:
        return "is empty"
    try:
        number = float(text)
    except ValueError:
        return f"must be a number, not {text[:40]!r}"
    if not math.isfinite(number):
        return f"must be a finite number, not {text}"
    if number < 0.0:
        return f"must not be negative, not {text}"
    return None if number <= MAX_NUMBER else f"must be at most {MAX_NUMBER:g}, not {text}"
