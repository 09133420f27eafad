"""The one polling helper of the system tests: real processes give no event to wait on
from outside.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.05


def wait_for(
    predicate: Callable[[], T],
    timeout_seconds: float,
    describe: Callable[[], object] | str,
    *,
    poll_seconds: float = POLL_SECONDS,
) -> T:
    """Poll until `predicate` is truthy and return its value.

    Raises AssertionError when the deadline passes; `describe` says what was
    waited for, or (called then) how things stood.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            state = describe if isinstance(describe, str) else describe()
            raise AssertionError(f"not within {timeout_seconds} s: {state}")
        time.sleep(poll_seconds)
    return value
