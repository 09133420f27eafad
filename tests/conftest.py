"""How `make test` deals the tests out to the processes of `pytest -n`; in a run without `-n` nothing is dealt out.

A file goes to one process, for its fixtures.  The tests of a group that shares
what is slow to start go to one process too.  What takes long begins first.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadGroupScheduling

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads of several processes would wait for one another

# On a machine that does other work too, an example's time says nothing of the code.
settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

HERE = Path(__file__).parent
SHARED = {"slow_cluster": "slow", "pair_cluster": "pair", "mixed_cluster": "pair"}
"""Session fixtures of many worker processes, and the group of those that use them; the first counts."""
LONGEST_FIRST = ("system", "apiserver", "worker/equality", "worker/model")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Name the groups before xdist reads them; sort when the order is a random one already."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        group = next((group for fixture, group in SHARED.items() if fixture in names), None)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("xdist_group") is not None:
        return -1
    path = item.path.relative_to(HERE).as_posix()
    return next((turn for turn, folder in enumerate(LONGEST_FIRST) if path.startswith(f"{folder}/")), len(LONGEST_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadGroupScheduling":
    """By group, or else by file."""
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).split("::")[0]

    return ByGroupOrFile(config, log)
