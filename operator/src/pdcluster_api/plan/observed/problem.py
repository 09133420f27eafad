"""The one shape of a problem: reason and message of a condition.

Faults of user input are `errors.Fault`, refused writes `observed.state.Failure`.
"""

from typing import NamedTuple


class Problem(NamedTuple):
    """An obstacle, for a condition.  reason: of `schema.conditions`."""

    reason: str
    message: str
