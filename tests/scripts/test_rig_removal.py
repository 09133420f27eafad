"""Ending a test cluster whose processes end by themselves while it is looked at; no cluster is
needed.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.rig import removal
from e2e.rig.paths import Cluster


@pytest.fixture(params=["collected", "zombie"])
def ended(request: pytest.FixtureRequest) -> Iterator[int]:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if request.param == "collected":
        process.wait()
    yield process.pid
    process.wait()


def test_a_holder_that_has_ended_has_no_children_and_no_control_group(ended: int):
    assert removal.children(ended) == []
    assert removal._groups_of(ended) == set()


def test_a_child_that_has_ended_has_nothing_mounted_and_nothing_is_left_to_end(
    ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(removal, "children", lambda holder: [ended])
    assert removal._groups_of(1) == set()
    removal._end(Cluster(tmp_path / "none"), 1)
