"""Ends of a container that count against it now, by the times in its pod's body.

Pure, and without a clock: a pod that became unready after an end had been ready in between, so that
end is over and says nothing of now.  Where the body lacks a time, an end counts.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

Body = Mapping[str, Any]

BACK_OFF = "CrashLoopBackOff"

UNREADY_GRACE = timedelta(seconds=60)
"""Longest time from a container's end to its pod being unready: the kubelet takes seconds, and a
worker whose engine has ended some more.
"""

BACKOFF_RESET = timedelta(minutes=10)
"""A run that was this long begins a new count, as it does for the kubelet's back-off."""


def latest_end(entry: Body, unready_since: str | None) -> Body:
    """The last end of a container that has to do with its pod being unready; empty = none has."""
    state = entry.get("state") or {}
    ended: Body = state.get("terminated") or (entry.get("lastState") or {}).get("terminated") or {}
    if (state.get("waiting") or {}).get("reason") == BACK_OFF:
        return ended
    at, since = _time(ended.get("finishedAt")), _time(unready_since)
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
    """Return whether the last run served for long before it ended: ends before it are over."""
    ended = latest_end(entry, unready_since)
    begin, end = _time(ended.get("startedAt")), _time(ended.get("finishedAt"))
    since = _time(unready_since)
    if begin is None or end is None or since is None:
        return False
    return end - begin >= BACKOFF_RESET and begin + UNREADY_GRACE < since


def _time(text: Any) -> datetime | None:
    """A time in UTC, as the API server writes it; None for anything else."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError):
        return None
