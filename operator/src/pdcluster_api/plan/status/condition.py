"""A condition of the status, before its times are known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Condition:
    """One condition without its times.  is_unknown: it is neither true nor false yet"""

    type: str
    is_true: bool
    reason: str
    message: str
    is_unknown: bool = False

    @property
    def status(self) -> str:
        """True, False or Unknown, as the API has it."""
        return "Unknown" if self.is_unknown else str(self.is_true)
