"""Find why a container ended, and whether that counts against it now. Pure. Times are left out, so
that the same reason gives the same words each time.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions

Body = Mapping[str, Any]

BACK_OFF = "CrashLoopBackOff"

# Longest time from a container's end to its pod being unready: the kubelet takes seconds, and a
# worker whose engine has ended some more
UNREADY_GRACE = timedelta(seconds=60)

# A run that was this long begins a new count, as it does for the kubelet's back-off
BACKOFF_RESET = timedelta(minutes=10)


def latest_end(entry: Body, unready_since: str | None) -> Body:
    """The last end of a container that has to do with its pod being unready; empty = none has."""
    state = entry.get("state") or {}
    ended: Body = state.get("terminated") or (entry.get("lastState") or {}).get("terminated") or {}
    if (state.get("waiting") or {}).get("reason") == BACK_OFF:
        return ended
    at, since = time_of(ended.get("finishedAt")), time_of(unready_since)
    is_over = at is not None and since is not None and at + UNREADY_GRACE < since
    return {} if is_over else ended


def keeps_crashing(entry: Body, unready_since: str | None) -> bool:
    """Return whether a container that has ended did so before, for the same spell of unreadiness.
    One crash may be chance; from the second on it counts, also while the container runs.
    """
    waiting = (entry.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") == BACK_OFF:
        return True
    return entry.get("restartCount", 0) >= 2 and not _is_first(entry, unready_since)


def _is_first(entry: Body, unready_since: str | None) -> bool:
    ended = latest_end(entry, unready_since)
    begin, end = time_of(ended.get("startedAt")), time_of(ended.get("finishedAt"))
    since = time_of(unready_since)
    if begin is None or end is None or since is None:
        return False
    return end - begin >= BACKOFF_RESET and begin + UNREADY_GRACE < since


def time_of(text: Any) -> datetime | None:
    """A time in UTC, as the API server writes it; None for anything else."""
    if not isinstance(text, str) or len(text) != len("2026-01-01T00:00:00Z") or text[-1] != "Z":
        return None
    try:
        return datetime.fromisoformat(text[:-1])
    except ValueError:
        return None


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
    last words.  One that only counts what is invalid is followed by the first of those.
    """
    lines = [_PROCESS.sub("", line.strip()).strip() for line in left.splitlines()]
    for at, line in enumerate(lines):
        if _RAISED.fullmatch(line) and _ELSEWHERE not in line:
            listed = _invalid(lines[at + 1 :]) if _COUNTED.search(line) else []
            return ": ".join((line, *listed))
    return termination_message("\n".join(lines))


def _invalid(lines: list[str]) -> list[str]:
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
    try:
        entry = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None  # only its end is left of it, or it merely begins like one
    return entry if isinstance(entry, dict) else None


def _message_of(entry: dict[str, object]) -> str:
    return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))


_POD = re.compile(r'pods "[^"]*" is ')
_PREFIX = re.compile(r"^.*? failed error: ", re.DOTALL)


def refusal_of(message: str) -> Problem:
    """Problem from a controller's message, without the name of the pod it tried."""
    short = _POD.sub("a pod is ", _PREFIX.sub("", message))
    reason = conditions.QUOTA_EXCEEDED if "exceeded quota" in message else conditions.PODS_REFUSED
    return Problem(reason, short)
