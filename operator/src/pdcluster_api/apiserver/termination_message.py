"""Find why a container ended, in the end of its log: the line that names the error.

Pure.  Times are left out, so that a container that ends again and again for
one reason leaves the same words each time.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

_ERROR_PREFIX = "error: "  # what our programs print before they exit on purpose
_LOGGED = re.compile(r" (?:ERROR|CRITICAL) (.*)")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)(?:: .*)?")  # the end of a traceback
_COUNTED = re.compile(r"\d+ validation errors? for ")
_INPUT = re.compile(r" ?\[type=.*")  # how pydantic ends what it lists
_MORE = "For further information"
_MOST_LISTED = 3  # lines
_PROCESS = re.compile(r"^\(\w+ pid=\d+\) ")  # vLLM marks the lines of each of its processes
_ELSEWHERE = "See root cause above"
_BAD_LEVELS = frozenset({"error", "dpanic", "panic", "fatal"})  # of etcd, which logs JSON
_TIME = re.compile(r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?Z? ")


def termination_message(left: str) -> str:
    """The last line with an error, without its mark; else the last line; empty if there is none."""
    lines = [line.strip() for line in left.splitlines() if line.strip()]
    return next(_errors(reversed(lines)), None) or _plain(lines[-1] if lines else "")


def first_error(left: str) -> str:
    """The first exception that names a cause, of a program whose processes pass one on; else the
    last words.

    One that only counts what is invalid is followed by the first of those.
    """
    lines = [_PROCESS.sub("", line.strip()).strip() for line in left.splitlines()]
    for at, line in enumerate(lines):
        if _RAISED.fullmatch(line) and _ELSEWHERE not in line:
            listed = _invalid(lines[at + 1 :]) if _COUNTED.search(line) else []
            return ": ".join((line, *listed))
    return termination_message("\n".join(lines))


def _invalid(lines: list[str]) -> list[str]:
    """The first of what pydantic lists: its place, if it has one, and what is wrong."""
    listed = takewhile(lambda line: line and not line.startswith(_MORE), lines[:_MOST_LISTED])
    found = []
    for line in listed:
        found.append(_INPUT.sub("", line))
        if _INPUT.search(line):
            break
    return found


def _errors(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        found = _error_in(line)
        if found:
            yield found


def _error_in(line: str) -> str | None:
    if line.startswith(_ERROR_PREFIX):
        return line.removeprefix(_ERROR_PREFIX)
    entry = _entry(line)
    if entry is not None:
        return _message_of(entry) if entry.get("level") in _BAD_LEVELS else None
    logged = _LOGGED.search(line)
    if logged:
        return logged[1]
    return line if _RAISED.fullmatch(line) else None


def _plain(line: str) -> str:
    entry = _entry(line)
    return (entry and _message_of(entry)) or _TIME.sub("", line)


def _entry(line: str) -> dict[str, object] | None:
    """A line of a log in JSON."""
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None  # only its end is left of it, or it merely begins like one
    return entry if isinstance(entry, dict) else None


def _message_of(entry: dict[str, object]) -> str:
    return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))
