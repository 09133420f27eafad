"""A load trace from a CSV file.

The columns, in any order, further ones ignored:
    seconds              when the row begins; the first row is the start of the replay
    requests_per_second  that arrive
    input_tokens         of a mean request's prompt
    output_tokens        of a mean request's answer
A row holds until the next one begins, the last as long as the one before it.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pdcluster_api.errors import InvalidTraceError
from pdcluster_schema.errors import Fault

COLUMNS = ("seconds", "requests_per_second", "input_tokens", "output_tokens")
MAX_ROWS = 1_000_000
MAX_NUMBER = 1e12
_MAX_FAULTS = 20
_WHOLE_FILE = ""
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class TraceLoad:
    seconds: float
    requests_per_second: float
    input_tokens: float
    output_tokens: float


@dataclass(frozen=True)
class Trace:
    """Loads in order of time, at least two; it begins at second 0."""

    loads: tuple[TraceLoad, ...]

    @property
    def duration_seconds(self) -> float:
        return 2.0 * self.loads[-1].seconds - self.loads[-2].seconds

    def every(self, seconds: float) -> Iterator[TraceLoad]:
        """Mean load of each interval; `seconds` is its start."""
        position = 0
        for number in range(math.ceil(self.duration_seconds / seconds - 1e-9)):
            begin = number * seconds
            while position + 1 < len(self.loads) and self.loads[position + 1].seconds <= begin:
                position += 1
            yield self._mean(begin, begin + seconds, position)

    def _mean(self, begin: float, end: float, position: int) -> TraceLoad:
        requests, inputs, outputs = 0.0, 0.0, 0.0
        at = begin
        while at < end:
            load = self.loads[position]
            is_last = position + 1 == len(self.loads)
            until = end if is_last else min(end, self.loads[position + 1].seconds)
            arrived = load.requests_per_second * (until - at)
            requests += arrived
            inputs += arrived * load.input_tokens
            outputs += arrived * load.output_tokens
            at, position = until, position if is_last else position + 1
        if requests <= 0.0:
            return TraceLoad(begin, 0.0, 0.0, 0.0)
        return TraceLoad(begin, requests / (end - begin), inputs / requests, outputs / requests)


def read_trace(path: Path) -> Trace:
    """Raises InvalidTraceError with every fault (the first 20 of many)."""
    lines = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            try:
                return _parse(reader)
            finally:
                lines = reader.line_num
    except OSError as e:
        raise InvalidTraceError(
            [
                Fault(
                    _WHOLE_FILE, f"cannot be read: {e.strerror or e}", "give the path of a CSV file"
                )
            ]
        ) from e
    except UnicodeDecodeError as e:
        raise InvalidTraceError(
            [Fault(_WHOLE_FILE, "is not UTF-8 text", "save it as CSV in UTF-8")]
        ) from e
    except csv.Error as e:
        raise InvalidTraceError(
            [Fault(f"line {lines}", f"is not CSV: {e}", "separate the values by commas")]
        ) from e


class _TraceReader(Protocol):
    """The part of `csv.reader` that is used."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Self: ...

    def __next__(self) -> list[str]: ...


def _parse(reader: _TraceReader) -> Trace:
    header = next(reader, None)
    if header is None:
        raise InvalidTraceError(
            [
                Fault(
                    _WHOLE_FILE,
                    "is empty",
                    f"write the line {','.join(COLUMNS)} and two rows or more",
                )
            ]
        )
    places = _places([name.strip() for name in header])
    loads: list[TraceLoad] = []
    faults: list[Fault] = []
    last = reader.line_num
    for cells in reader:
        line, last = last + 1, reader.line_num  # a row may hold line breaks, in quotes
        if not any(cell.strip() for cell in cells):
            continue
        numbers, wrong = (
            _row(line, cells, places)
            if len(cells) <= len(header)
            else ({}, [_too_long(line, len(cells), len(header))])
        )
        if not wrong and loads and numbers["seconds"] <= loads[-1].seconds:
            reason = (
                f"must be more than {loads[-1].seconds:g} of the row before, not "
                f"{numbers['seconds']:g}"
            )
            wrong = [
                Fault(
                    f"line {line}, column seconds",
                    reason,
                    "sort the rows by time, and give each time once",
                )
            ]
        faults += wrong
        if not wrong:
            loads.append(TraceLoad(**numbers))
        if len(faults) >= _MAX_FAULTS or len(loads) > MAX_ROWS:
            break
    if len(loads) > MAX_ROWS:
        faults.append(
            Fault(
                f"line {MAX_ROWS + 2}",
                f"a trace holds at most {MAX_ROWS} rows",
                "take the mean of several rows",
            )
        )
    elif not faults and len(loads) < 2:
        reason = (
            f"needs two rows or more, not {len(loads)}: the last lasts as long as the one before it"
        )
        faults.append(Fault(_WHOLE_FILE, reason, "add rows below the line of names"))
    if faults:
        raise InvalidTraceError(faults[:_MAX_FAULTS])
    return Trace(_from_zero(loads))


def _too_long(line: int, cells: int, names: int) -> Fault:
    reason = f"has {cells} values, and line 1 has {names} names"
    return Fault(
        f"line {line}",
        reason,
        "write decimals with a point, as in 12.5, and put text that holds a comma in quotes",
    )


def _places(header: Sequence[str]) -> Mapping[str, int]:
    if len(header) == 1 and (
        separator := next((each for each in ";\t|" if each in header[0]), None)
    ):
        reason = f"has its names separated by {_SEPARATORS[separator]}"
        raise InvalidTraceError(
            [Fault("line 1", reason, f"separate names and values by commas: {','.join(COLUMNS)}")]
        )
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        found = ", ".join(header) or "nothing"
        fix = f"name the columns {', '.join(COLUMNS)}"
        raise InvalidTraceError(
            [
                Fault(f"line 1, column {name}", f"is missing; there are {found}", fix)
                for name in missing
            ]
        )
    repeated = [name for name in COLUMNS if header.count(name) > 1]
    if repeated:
        raise InvalidTraceError(
            [
                Fault(f"line 1, column {name}", "is given twice", "keep one of them")
                for name in repeated
            ]
        )
    return {name: header.index(name) for name in COLUMNS}


def _row(
    line: int, cells: Sequence[str], places: Mapping[str, int]
) -> tuple[dict[str, float], list[Fault]]:
    numbers: dict[str, float] = {}
    faults = []
    for name, place in places.items():
        text = cells[place].strip() if place < len(cells) else ""
        reason = _wrong(text)
        if reason is None:
            numbers[name] = float(text)
        else:
            faults.append(
                Fault(
                    f"line {line}, column {name}", reason, "write a number from 0 on, such as 12.5"
                )
            )
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


def _from_zero(loads: Sequence[TraceLoad]) -> tuple[TraceLoad, ...]:
    first = loads[0].seconds
    return tuple(
        TraceLoad(
            load.seconds - first, load.requests_per_second, load.input_tokens, load.output_tokens
        )
        for load in loads
    )
