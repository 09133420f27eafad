"""Deals the tests out to the processes of `pytest -n`, as `make test` runs them; without `-n` it
does nothing.

A file goes to one process, because of its fixtures.  Files that share a running
cluster of worker processes go to one process too, since it is slow to start, and
begin first.  The other files that start processes come last: they are what a run
leaves out that has used its time (tests/until.py).
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

if "PYTEST_XDIST_WORKER" in os.environ:
    # torch's threads of several processes would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.quick"]

# On a machine that does other work too, an example's time says nothing of the code.
settings.register_profile(
    "busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")

ROOT = Path(__file__).parents[1]
SHARED = (
    ("slow and pair", re.compile(r"^def \w+\([^)]*\bslow\b", re.MULTILINE)),
    ("pair", re.compile(r"^def \w+\([^)]*\b(pair|mixed)\b", re.MULTILINE)),
)
"""Files of tests/system whose tests ask for one of these fixtures share their clusters; the first
that fits counts.
"""
LAST = ("tests/worker/model/", "tests/worker/equality/", "tests/system/")


@functools.cache
def group_of(file: str) -> str:
    """Name of the group of files that one process runs with this one; the file itself without one.

    file: its path from the root.
    """
    if not file.startswith("tests/system/"):
        return file
    text = (ROOT / file).read_text()
    return next((group for group, fixture in SHARED if fixture.search(text)), file)


def turn_of(file: str) -> int:
    """Files with a lower number begin earlier."""
    if group_of(file) != file:
        return -1
    return next((turn for turn, folder in enumerate(LAST, 1) if file.startswith(folder)), 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Sort for `-n`, when the order is a random one already."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: turn_of(item.nodeid.split("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadFileScheduling":
    """By group, or else by file."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    return ByGroup(config, log)
