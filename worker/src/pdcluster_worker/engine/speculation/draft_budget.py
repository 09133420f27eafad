"""Decide if drafts pay: by the share that was right, and by the cost of a further row in a step."""

# With n rows a step takes a + b * n seconds.  d drafts of which a share s is right give n + s * d
# tokens in a + b * (n + d) seconds and the seconds of drafting them: per token that is less than
# without drafts if s > n * (b + seconds of drafting one) / (a + b * n).  One stream gains by almost
# any share, a large batch by none that is below 1.  A request whose drafts do not pay is given
# none, but one now and then to see whether that has changed.

from dataclasses import dataclass

FIRST_SHARE = 0.5
"""Share of a request that has not been drafted yet."""
NEW_WEIGHT = 0.2
"""Weight of one verification in a request's share."""
RETURN = 0.005
"""Fraction of the way back to the first share, per step in which a low share stops the drafts."""

FORGET = 0.97
"""Weight that earlier figures keep at each step."""
ROW_COST = 0.02
"""Seconds of a further row as a share of a step's, where nothing is measured."""
DOUBT = 4.0
"""Rows squared by which the sizes of steps must vary before what is measured outweighs that."""


@dataclass(slots=True)
class AcceptanceRate:
    """Share of a request's recent drafts that is right."""

    value: float = FIRST_SHARE

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.value += NEW_WEIGHT * (num_accepted / num_drafts - self.value)

    def drift(self) -> None:
        self.value += RETURN * (FIRST_SHARE - self.value)


class DecodeStepTimes:
    """Seconds of decode steps by their rows: a line through the last of them."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._draft_seconds = 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        for name, value in (("weight", 1.0), ("rows", num_rows), ("seconds", seconds)):
            self._fade(name, value)
        self._fade("squares", num_rows * num_rows)
        self._fade("products", num_rows * seconds)

    def add_drafting(self, num_drafts: int, seconds: float) -> None:
        self._draft_seconds += 0.1 * (seconds / max(1, num_drafts) - self._draft_seconds)

    def least_share(self, num_rows: int) -> float:
        """Drafts pay above this share of right ones, in a step of so many rows; 0 to 1."""
        if self._weight == 0.0:
            return 0.0
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        if mean_seconds <= 0.0:
            return 0.0
        variance = max(0.0, self._squares / self._weight - mean_rows**2)
        covariance = self._products / self._weight - mean_rows * mean_seconds
        row_seconds = max(0.0, (covariance + DOUBT * ROW_COST * mean_seconds) / (variance + DOUBT))
        whole = max(mean_seconds + row_seconds * (num_rows - mean_rows), row_seconds * num_rows)
        return min(1.0, num_rows * (row_seconds + self._draft_seconds) / whole)

    def _fade(self, name: str, value: float) -> None:
        setattr(self, f"_{name}", FORGET * getattr(self, f"_{name}") + value)
