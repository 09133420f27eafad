"""Drain commands of one PDCluster: since when each pod should drain, or serve again.

Pure: the clock is passed in, in seconds that only go forward.  A command that is already in etcd
keeps its start, also for an operator that restarts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

UNDRAIN_DELAY_SECONDS = 1.0
"""Between the reconcile that wants a pod to serve again and the end of its drain command.

The pod may be terminating already, and the watch brings that later.
"""


@dataclass
class DrainCommands:
    """Wanted commands, and those that are left over.

    _requested: per pod that should drain, the start of its drain
    _spare: per pod with a command that should serve again, since when
    """

    _requested: dict[str, float] = field(default_factory=dict)
    _spare: dict[str, float] = field(default_factory=dict)

    def ask(self, drain: Collection[str], commanded: Iterable[str], now: float) -> None:
        """Want commands for exactly these pods.  commanded: pods that have one"""
        self._requested = {pod: self._requested.get(pod, now) for pod in drain}
        self._spare = {pod: self._spare.get(pod, now) for pod in commanded if pod not in drain}

    def learn(self, ages: Mapping[str, float], now: float) -> None:
        """Take over commands that were found, with the seconds since their start."""
        for pod, age in ages.items():
            self._requested.setdefault(pod, now - max(0.0, age))

    @property
    def is_any(self) -> bool:
        """Return whether there is any command, or one that is left over."""
        return bool(self._requested or self._spare)

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since the start of each drain."""
        return {pod: now - since for pod, since in self._requested.items()}

    def missing(self, commanded: Collection[str], now: float) -> dict[str, float]:
        """Wanted commands that are not written, with the seconds since the start of the drain."""
        return {pod: age for pod, age in self.ages(now).items() if pod not in commanded}

    def removable(self, now: float) -> set[str]:
        """Pods whose command is to be removed now."""
        return {pod for pod, since in self._spare.items() if now - since >= UNDRAIN_DELAY_SECONDS}
