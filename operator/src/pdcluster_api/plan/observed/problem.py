"""Reason and message of a condition."""

from typing import NamedTuple


class Problem(NamedTuple):
    """An obstacle, for a condition.  reason: of `schema.conditions`."""

    reason: str
    message: str
