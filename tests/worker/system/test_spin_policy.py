"""Threads of the model spin only on cores that the worker owns; its environment may
say otherwise.
"""

import subprocess
import sys

import pytest

from pdcluster_worker.system import cpu_cores
from pdcluster_worker.system.cpu_cores import own_cores, spins, spins_of, wait_environment


@pytest.mark.parametrize(
    ("environment", "limits", "requested", "own"),
    [
        ({}, [], 0.0, 0.0),  # nothing says that the cores are its own
        ({}, [4.0, 2.5], 4.0, 2.5),
        ({}, [4.0], 1.0, 1.0),  # the limit is shared with whatever else runs there
        ({}, [], 2.0, 2.0),
        ({"PDCLUSTER_OWN_CORES": "2"}, [], 0.0, 2.0),
        # its starter knows better than a request, or a limit that several share
        ({"PDCLUSTER_OWN_CORES": "0"}, [4.0], 4.0, 0.0),
        ({"PDCLUSTER_OWN_CORES": "many"}, [4.0], 4.0, 4.0),
    ],
)
def test_own_cores_are_those_of_the_starter_or_requested(environment, limits, requested, own):
    assert own_cores(environment, limits, requested) == own


@pytest.mark.parametrize(
    ("threads", "own", "expected"),
    [(1, 8.0, False), (2, 2.0, True), (2, 1.5, False), (3, 2.0, False), (2, 0.0, False)],
)
def test_threads_spin_where_each_has_a_core_of_its_own(threads, own, expected):
    assert spins(threads, own) is expected


def test_what_is_set_already_is_kept(monkeypatch):
    monkeypatch.setattr(cpu_cores, "process_limits", list)
    monkeypatch.setattr(cpu_cores, "process_request", lambda: 0.0)
    own = {"PDCLUSTER_OWN_CORES": "2"}
    assert wait_environment(2, own) == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
    assert wait_environment(2, {}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert wait_environment(2, {**own, "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}) == {}


def test_threads_that_may_be_lent_spin(monkeypatch):
    monkeypatch.setattr(cpu_cores, "process_limits", list)
    monkeypatch.setattr(cpu_cores, "process_request", lambda: 0.0)
    lent = {"PDCLUSTER_OWN_CORES": "1", "PDCLUSTER_SHARED_CORES": "{}"}
    assert wait_environment(1, lent) == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
    assert wait_environment(1, {**lent, "PDCLUSTER_SHARED_CORES": ""}) == {
        "OMP_WAIT_POLICY": "PASSIVE"
    }


def test_our_own_waits_spin_as_long_as_those_of_openmp():
    assert spins_of({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "300"}) == 300
    assert spins_of({"OMP_WAIT_POLICY": "PASSIVE"}) == 0
    assert spins_of({"GOMP_SPINCOUNT": "9" * 30}) == cpu_cores.MOST_SPINS


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMP_WAIT_POLICY": "ACTIVE"},
        {"GOMP_SPINCOUNT": "INFINITE"},
        {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20k"},
        {"GOMP_SPINCOUNT": "²"},
    ],
)
def test_our_own_waits_spin_for_a_moment_where_openmp_does(environment):
    assert spins_of(environment) == cpu_cores.SPIN_COUNT


def test_the_decision_needs_no_torch():
    code = "import pdcluster_worker.processes.server_process, sys; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False"]
