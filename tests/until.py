"""`pytest -p tests.until`, as `.ci/run` runs it: no test begins after the time in
PDCLUSTER_TESTS_UNTIL, in seconds since 1970.

A CI run over its time limit says nothing at all.  Those left out are skipped, with the reason, so
the closing line counts them.
"""

import os
import time

import pytest

UNTIL = float(os.environ.get("PDCLUSTER_TESTS_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture."""
    if time.time() >= UNTIL:
        pytest.skip("not run: its part of .ci/run had used its time; its make target runs it")
