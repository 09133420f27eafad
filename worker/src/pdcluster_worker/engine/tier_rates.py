"""Measured rates, and the choice that they make: to read a prefix from a tier, or to compute it."""

from dataclasses import dataclass

HALF_LIFE = 32
"""Measurements after which an older one counts half."""

FORGET_SECONDS = 60.0
"""A rate that was not measured for so long is unknown: reading measures it."""


class Rate:
    """Mean seconds of one thing, the recent ones first."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._measured = 0.0

    def add(self, seconds: float, now: float, weight: int = 1) -> None:
        kept = 0.5 ** (weight / HALF_LIFE)
        self._mean = seconds if self._mean is None else kept * self._mean + (1 - kept) * seconds
        self._measured = now

    def at(self, now: float) -> float | None:
        """None while it is unknown."""
        return None if now - self._measured > FORGET_SECONDS else self._mean


@dataclass(frozen=True, slots=True)
class ReadEstimate:
    """Expected seconds; 0 = not measured."""

    read: float = 0.0
    compute: float = 0.0

    @property
    def pays(self) -> bool:
        """True too while one of them is unknown.

        >>> ReadEstimate(read=0.1, compute=0.5).pays, ReadEstimate(read=0.5, compute=0.1).pays
        (True, False)
        >>> ReadEstimate(read=0.0, compute=0.1).pays, ReadEstimate(read=9.0).pays
        (True, True)
        """
        return not (self.read and self.compute) or self.read < self.compute
