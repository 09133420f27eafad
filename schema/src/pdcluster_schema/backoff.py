"""Exponential back-off: the delay before the next try, by the number of failures in a row."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """`first` seconds after one failure, twice as long after each further one, at most `most`."""

    first: float
    most: float

    def after(self, num_failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least one.

        >>> [Backoff(first=1.0, most=5.0).after(number) for number in (1, 2, 3, 4)]
        [1.0, 2.0, 4.0, 5.0]
        """
        return min(self.most, self.first * 2.0 ** min(num_failures - 1, 32))
