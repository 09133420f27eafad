"""Restarts of workers of several pods: why, how often, and when the next start is due. Pure. An
annotation of the worker's StatefulSets holds the last one, as its pods go.
"""

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from pdcluster_api.apiserver.container_ends import BACKOFF_RESET, time_of
from pdcluster_api.plan.observed.state import Problem
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_schema import conditions
from pdcluster_schema.backoff import Backoff

_BACKOFF = Backoff(first=10.0, most=300.0)  # the kubelet's
_AT = re.compile(r"20\d\d-\S+Z")


class PodEnd(NamedTuple):
    """The pod that ended while others of its worker ran on."""

    pod: str
    why: str
    is_crash: bool  # and not deleted, evicted or replaced

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.why}"


@dataclass(frozen=True)
class GroupRestart:
    """One restart of a worker.  Of crashes in a row, none comes after it has served for
    `BACKOFF_RESET`, however long it took to load.
    """

    number: int  # of all restarts of the worker
    crashes: int  # in a row, with this one; 0 = it was none
    at: str  # RFC 3339
    cause: str

    @classmethod
    def read(cls, text: str | None) -> "GroupRestart | None":
        """From the annotation; None = there is none, or it is not ours."""
        try:
            found = json.loads(text or "")
            number, crashes = int(found["number"]), int(found["crashes"])
            at, cause = str(found["at"]), str(found["cause"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        is_ours = number > 0 <= crashes and _AT.fullmatch(at) and time_of(at) is not None
        return cls(number, crashes, at, cause) if is_ours else None

    @classmethod
    def after(
        cls,
        last: "GroupRestart | None",
        end: PodEnd,
        now: datetime,
        served_since: datetime | None = None,
    ) -> "GroupRestart":
        """served_since: None = it has not served since the last one"""
        has_recovered = served_since is not None and now >= served_since + BACKOFF_RESET
        before = last.crashes if last is not None and not has_recovered else 0
        return cls(
            number=last.number + 1 if last else 1,
            crashes=before + 1 if end.is_crash else 0,
            at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            cause=str(end),
        )

    def __str__(self) -> str:
        """The annotation."""
        return json.dumps(asdict(self))

    @property
    def _backoff_seconds(self) -> float:
        """The first crash costs no wait."""
        return _BACKOFF.after(self.crashes - 1) if self.crashes > 1 else 0.0

    @property
    def starts_at(self) -> datetime:
        """Earliest time at which its pods are made again."""
        return (time_of(self.at) or datetime.min) + timedelta(seconds=self._backoff_seconds)

    def wait_seconds(self, now: datetime) -> float:
        """Until then; a longer one than the back-off is by a clock that was ahead."""
        seconds = (self.starts_at - now).total_seconds()
        return seconds if seconds <= self._backoff_seconds else 0.0

    @property
    def problem(self) -> Problem:
        if self.crashes < 2:
            return Problem(conditions.GROUP_RESTARTING, f"{self.cause}; {ALL_START_AGAIN}")
        start = self.starts_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        message = f"{self.cause}; {self.crashes} crashes in a row, all pods start again at {start}"
        return Problem(conditions.CRASH_LOOPING, message)

    def event(self, worker: str) -> PlannedEvent:
        row = f"{self.crashes} crashes in a row" if self.crashes > 1 else ALL_START_AGAIN
        text = f"worker {worker}, restart {self.number}: {self.cause}; {row}"
        return PlannedEvent(conditions.GROUP_RESTARTING, text, warning=True)


ALL_START_AGAIN = "all pods of its worker start again"
