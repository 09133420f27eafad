"""Cores of a worker: lent between engines of one machine, and spun on only where it owns them."""

import ctypes
import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.system import cpu_cores
from pdcluster_worker.system.cpu_cores import (
    VARIABLE,
    CoreShare,
    SharedCores,
    allotted,
    core_share,
    own_cores,
    spins,
    spins_of,
    wait_environment,
)

WORKERS = st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=8)


@pytest.fixture
def open_place(tmp_path):
    return lambda place, threads=(1, 1), cores=2: SharedCores(
        CoreShare(str(tmp_path / "cores"), place, threads, cores)
    )


def number_at(cores: SharedCores) -> int:
    return ctypes.c_int32.from_address(cores.address).value


@given(workers=WORKERS, unowned=st.integers(0, 5))
def test_working_engines_have_their_own_cores_and_together_all_of_them(workers, unowned):
    threads, rests = [own for own, _ in workers], [rests for _, rests in workers]
    cores = sum(threads) + unowned
    works = [place for place, has_rest in enumerate(rests) if not has_rest]
    shares = {place: allotted(place, threads, rests, cores) for place in works}

    assert all(shares[place] >= threads[place] for place in works)
    assert sum(shares.values()) == (cores if works else 0)
    extra = [shares[place] - threads[place] for place in works]
    assert not extra or max(extra) - min(extra) <= 1


@given(workers=WORKERS)
def test_nothing_is_lent_where_threads_are_more_than_cores(workers):
    threads = [own for own, _ in workers]
    working = [False] * len(threads)
    assert [allotted(place, threads, working, 1) for place in range(len(threads))] == threads


def test_an_engine_that_rests_lends_its_core_and_has_it_back_at_once(open_place):
    prefill, decode = open_place(0), open_place(1)
    assert (prefill.take(), decode.take()) == (1, 1)

    prefill.rest()
    assert (decode.take(), number_at(decode)) == (2, 2)

    assert prefill.take() == 1
    assert number_at(decode) == 1  # in the middle of its step
    assert decode.take() == 1


def test_an_engine_that_works_on_takes_nothing_from_others(open_place):
    first, second, third = (open_place(place, (1, 1, 1), 3) for place in range(3))
    third.rest()
    assert (first.take(), second.take()) == (2, 1)
    second.rest()
    assert first.take() == 3
    assert number_at(second) == 1  # as it was: it computes its own when it begins
    assert second.take() == 1
    assert number_at(first) == 2


def test_an_engine_that_starts_or_is_not_there_yet_lends_nothing(open_place):
    decode = open_place(1)
    assert decode.take() == 1

    open_place(0).rest()
    assert decode.take() == 2
    open_place(0)  # again, after its end
    assert number_at(decode) == 1  # in the middle of a step
    assert decode.take() == 1


def test_an_engine_that_is_killed_while_it_works_lends_nothing_until_it_is_there_again(open_place):
    decode, killed = open_place(1), open_place(0)
    killed.take()
    del killed
    assert decode.take() == 1

    open_place(0).rest()
    assert decode.take() == 2


def test_an_engine_that_begins_while_another_counts_has_its_core(open_place, monkeypatch):
    prefill, decode = open_place(0), open_place(1)
    prefill.rest()
    counted = SharedCores._allotted
    begun = []

    def begin_first(cores, place, rests):
        if cores is decode and not begun:
            begun.append(prefill)
            prefill.take()
        return counted(cores, place, rests)

    monkeypatch.setattr(SharedCores, "_allotted", begin_first)
    assert decode.take() == 1
    assert (number_at(decode), number_at(prefill)) == (1, 1)


def test_most_threads_are_all_cores(open_place):
    assert open_place(0, (1, 2), 4).most == 4


def test_a_place_is_read_from_the_environment():
    said = {"path": "/tmp/cores", "place": 1, "threads": [1, 2], "cores": 4}
    assert core_share({VARIABLE: json.dumps(said)}) == CoreShare("/tmp/cores", 1, (1, 2), 4)
    assert core_share({}) is None


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("2", "Expected `object`"),
        ('{"path": "p", "place": 0, "threads": [1]}', "missing required field `cores`"),
        ('{"path": "p", "place": 2, "threads": [1, 1], "cores": 2}', "place 2 of threads [1, 1]"),
        ('{"path": "p", "place": 0, "threads": [0], "cores": 2}', "`int` >= 1 - at `$.threads"),
        ('{"path": "p", "place": 0, "threads": [3000000000], "cores": 2}', "`int` <= 8192"),
        ('{"path": "p", "place": 0, "threads": [1], "cores": 100000}', "<= 8192 - at `$.cores`"),
        ('{"path": "p", "place": 0, "threads": [2, 1], "cores": 2}', "more than its 2 cores"),
        ("\udcff", "surrogates not allowed"),
        ('{"path": "p", "place": 0, "threads": [], "cores": 2}', "place 0 of threads []"),
    ],
)
def test_a_wrong_place_is_refused_by_the_variable(said, fault):
    with pytest.raises(ConfigError) as refused:
        core_share({VARIABLE: said})
    assert str(refused.value).startswith(f"{VARIABLE}: ")
    assert fault in str(refused.value)
    assert "leave it out" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("missing/cores", "cannot open .*missing/cores': .*No such file"),
        ("a\0b", "cannot open .*null byte"),
        ("notes", "'.*notes' is no file of 64 bytes for 1 engines"),
        ("pipe", "'.*pipe' is no file of 64 bytes"),
        ("full", "cannot write '.*full'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(tmp_path, name, fault, monkeypatch):
    (tmp_path / "notes").write_text("of a user")
    os.mkfifo(tmp_path / "pipe")
    if name == "full":
        monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=fault) as refused:
        SharedCores(CoreShare(str(tmp_path / name), 0, (1,), 1))
    assert "leave it out" in str(refused.value)
    assert (tmp_path / "notes").read_text() == "of a user"


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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
