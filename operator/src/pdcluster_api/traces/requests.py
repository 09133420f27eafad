"""Single requests by their time, and the file that names each of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_api.errors import InvalidTraceError
from pdcluster_schema.faults import Fault

MAX_TOKENS = 10_000_000  # of one request
MAX_SECONDS = 366 * 86400.0  # between the first and the last
_MAX_TIMESTAMP = 1e18
_MAX_FAULTS = 20
_FIELDS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """hash_ids: of the prompt's blocks; equal ids are equal tokens after an equal start."""

    seconds: float
    input_tokens: int
    output_tokens: int
    priority: int = 0
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Requests by their time.

    block_tokens: of a hash id; 0 = without
    ends:         times at which the load becomes another one, the last of them its end
    """

    requests: Sequence[TraceRequest]
    block_tokens: int = 0
    ends: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        last = self.requests[-1].seconds if self.requests else 0.0
        return max((last, *self.ends[-1:]))

    @property
    def has_priorities(self) -> bool:
        return any(each.priority for each in self.requests)

    def part(self, number: int, of: int) -> "LoadTrace":
        """Every `of`-th request, as a gateway hands them out in turn."""
        return LoadTrace(self.requests[number::of], self.block_tokens, self.ends)


def read_requests(path: Path, block_tokens: int = 512) -> LoadTrace:
    """A file of JSON lines by the names of Mooncake's traces.

    timestamp: milliseconds; input_length, output_length: tokens; hash_ids: optional, of blocks of
    `block_tokens`; priority: optional.  Raises InvalidTraceError with every fault (the first 20).
    """
    requests: list[TraceRequest] = []
    faults: list[Fault] = []
    first = before = 0.0
    for line, text in _lines(path):
        row = _row(line, text, block_tokens)
        if isinstance(row, TraceRequest):
            first, before = (first, before) if requests else (row.seconds, row.seconds)
            fault = _time_fault(line, row.seconds, before, first)
            if fault is None:
                before = row.seconds
                requests.append(row)
                continue
            row = [fault]
        faults += row
        if len(faults) >= _MAX_FAULTS:
            break
    if not faults and not requests:
        faults = [Fault("", "holds no request", "write a line of JSON for each request")]
    if faults:
        raise InvalidTraceError(faults[:_MAX_FAULTS])
    shifted = [_shifted(each, first) for each in requests] if first else requests
    has_ids = any(each.hash_ids for each in requests)
    return LoadTrace(shifted, block_tokens if has_ids else 0)


def _time_fault(line: int, seconds: float, before: float, first: float) -> Fault | None:
    """before, first: seconds of the request above, and of the first one."""
    place = f"line {line}, timestamp"
    if seconds < before:
        reason = f"is {1000 * seconds:g}, before the {1000 * before:g} of the request above"
        return Fault(place, reason, "sort the requests by time")
    if seconds - first > MAX_SECONDS:
        reason = f"is {seconds - first:g} s after the first request, over {MAX_SECONDS:g} s"
        return Fault(place, reason, "give it in milliseconds, or cut the trace")
    return None


def _shifted(request: TraceRequest, first: float) -> TraceRequest:
    return TraceRequest(
        request.seconds - first,
        request.input_tokens,
        request.output_tokens,
        request.priority,
        request.hash_ids,
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except OSError as e:
        reason = f"cannot be read: {e.strerror or e}"
        fault = Fault("", reason, "give the path of a file of JSON lines, or of CSV")
        raise InvalidTraceError([fault]) from e
    except UnicodeDecodeError as e:
        raise InvalidTraceError([Fault("", "is not UTF-8 text", "save it as UTF-8")]) from e


def _row(line: int, text: str, block_tokens: int) -> TraceRequest | list[Fault]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as e:
        reason = f"is not JSON: {e}" if isinstance(e, ValueError) else "is nested too deep"
        return [Fault(f"line {line}", reason, "write one object in each line")]
    if not isinstance(row, dict):
        return [Fault(f"line {line}", "is no object", 'write {"timestamp": 0, ...} in each line')]
    faults = [fault for name in _FIELDS if (fault := _number_fault(line, name, row)) is not None]
    priority, ids = row.get("priority", 0), row.get("hash_ids", [])
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > 1000:
        fix = "write a whole number from -1000 to 1000"
        faults.append(Fault(f"line {line}, priority", f"must not be {priority!r}", fix))
    if not faults and ids != []:
        faults = _ids_faults(line, ids, int(row["input_length"]), block_tokens)
    if faults:
        return faults
    seconds = float(row["timestamp"]) / 1000.0
    return TraceRequest(
        seconds, int(row["input_length"]), int(row["output_length"]), priority, tuple(ids)
    )


def _number_fault(line: int, name: str, row: dict[str, Any]) -> Fault | None:
    place = f"line {line}, {name}"
    if name not in row:
        return Fault(place, "is missing", f"write {', '.join(_FIELDS)} in each line")
    value, least = row[name], 0 if name == "timestamp" else 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number:
        return Fault(place, f"must be a whole number, not {value!r}", f"write {least} or more")
    if not least <= value < float("inf"):
        return Fault(place, f"must not be {value}", f"write a finite number from {least} on")
    if name != "timestamp" and value != int(value):
        return Fault(place, f"must be a whole number, not {value!r}", f"write {least} or more")
    if name == "timestamp" and value > _MAX_TIMESTAMP:
        return Fault(place, f"must be at most {_MAX_TIMESTAMP:g} ms", "give it in milliseconds")
    if name != "timestamp" and value > MAX_TOKENS:
        return Fault(place, f"must be at most {MAX_TOKENS} tokens, not {value}", "shorten it")
    return None


def _ids_faults(line: int, ids: Any, input_tokens: int, block_tokens: int) -> list[Fault]:
    place, needed = f"line {line}, hash_ids", -(-input_tokens // block_tokens)
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        return [Fault(place, "must be a list of whole numbers", "write one for each block")]
    if len(ids) != needed:
        reason = (
            f"has {len(ids)} ids, and {input_tokens} tokens in blocks of {block_tokens} are "
            f"{needed}"
        )
        return [Fault(place, reason, "give the trace's own block length with --trace-block-tokens")]
    return []
