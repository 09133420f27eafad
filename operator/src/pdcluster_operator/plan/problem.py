"""The one shape of a problem: reason and message of a condition.

Faults of user input are `api.errors.Fault`, refused writes `state.Failure`.
"""

from typing import NamedTuple


class Problem(NamedTuple):
    """An obstacle, for a condition.  reason: of api.conditions."""

    reason: str
    message: str
