"""CPU and memory limits and the CPU request are read from cgroups v1 and v2, and never too high."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdcluster_worker.system.cgroups import (
    CGROUP_ROOT,
    available_threads,
    cgroup_limits,
    cgroup_memory_limits,
    cgroup_request,
    cores_of_weight,
    memory_limit,
    parse_cpu_max,
    threads_for,
)
from pdcluster_worker.system.cpu_cores import own_cores, spins

V2, V2_POD = "0::/\n", "0::/kube/pod\n"
GUARANTEED, BURSTABLE, BEST_EFFORT = "-997\n", "870\n", "1000\n"


def write(root: Path, **files: str) -> Path:
    """Files of cgroups: in a name `__` is a slash, and the first `_` of the file a dot."""
    for name, text in files.items():
        folder, _, file = name.rpartition("__")
        path = root / folder.replace("__", "/") / file.replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def spins_with(threads: int, root: Path, oom_score: str, proc_cgroup: str = V2) -> bool:
    limits = cgroup_limits(proc_cgroup, root)
    return spins(threads, own_cores({}, limits, cgroup_request(proc_cgroup, oom_score, root)))


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("-1 100000", None),
        ("", None),
        ("x y", None),
        ("1 0", None),
    ],
)
def test_a_quota_and_a_period_are_cores(text, cores):
    assert parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("num_cores", "limits", "threads"),
    [(8, [], 8), (8, [2.0], 2), (8, [3.5, 2.7], 2), (8, [0.5], 1), (2, [16.0], 2)],
)
def test_threads_are_the_least_limit_rounded_down(num_cores, limits, threads):
    assert threads_for(num_cores, limits) == threads


def test_v2_limits_of_all_ancestors_apply(tmp_path):
    write(tmp_path, kube__pod__cpu_max="max 100000", kube__cpu_max="300000 100000")
    write(tmp_path, kube__pod__memory_max="max", kube__memory_max="4294967296")
    assert cgroup_limits(f"nonsense\n{V2_POD}", tmp_path) == [3.0]
    assert cgroup_memory_limits(V2_POD, tmp_path) == [4 << 30]


def test_v1_limits_and_shares_are_read_where_the_container_sees_them(tmp_path):
    folder = tmp_path / "cpu,cpuacct"
    write(folder, cpu_cfs_quota_us="250000", cpu_cfs_period_us="100000", cpu_shares="2560")
    write(tmp_path, memory__memory_limit_in_bytes="1073741824")
    own = "3:cpu,cpuacct:/not/visible/here\n4:memory:/kube/pod\n"
    assert cgroup_limits(own, tmp_path) == [2.5]
    assert cgroup_request(own, BURSTABLE, tmp_path) == 2.5
    assert cgroup_memory_limits(own, tmp_path) == [1 << 30]


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert (cgroup_limits("", tmp_path), cgroup_memory_limits("", tmp_path)) == ([], [])


def test_this_machine_has_a_thread_and_no_more_memory_than_it_has():
    assert available_threads() >= 1
    found = memory_limit()
    assert found is not None
    assert 0 < found <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("cores", "weight", "older_weight"),
    [
        (0.5, 59, 20),
        (1, 100, 39),
        (2, 174, 79),
        (4, 303, 157),
        (64, 3023, 2500),
        (256, 10000, 10000),
    ],
)
def test_cores_of_a_weight_are_those_requested_or_fewer(cores, weight, older_weight):
    assert cores_of_weight(weight) == pytest.approx(cores, rel=0.03)
    assert cores_of_weight(weight) >= cores  # rounding keeps no pod from spinning
    assert cores_of_weight(older_weight) <= cores


@pytest.mark.parametrize(
    ("cpu_max", "weight", "oom_score", "most"),
    [
        ("200000 100000", "79", GUARANTEED, 2),  # of an older runtime
        ("200000 100000", "174", GUARANTEED, 2),
        ("200000 100000", "174", BURSTABLE, 2),
        ("200000 100000", "138", BURSTABLE, 1),  # 1.5 cores
        ("200000 100000", "79", BURSTABLE, 1),  # 2 of an older runtime
        ("200000 100000", "17", BURSTABLE, 1),
        ("max 100000", "303", BURSTABLE, 4),
        ("max 100000", "100", GUARANTEED, 1),  # an OOM score alone gives no cores
        ("max 100000", "1", BEST_EFFORT, 1),
        ("800000 100000", "1", BEST_EFFORT, 1),
    ],
)
def test_a_pod_spins_where_its_request_covers_the_threads(
    tmp_path, cpu_max, weight, oom_score, most
):
    write(tmp_path, cpu_max=cpu_max, cpu_weight=weight)
    assert spins_with(2, tmp_path, oom_score) is (most >= 2)
    assert spins_with(most, tmp_path, oom_score) is (most >= 2)
    assert not spins_with(most + 1, tmp_path, oom_score)


@pytest.mark.parametrize("text", [None, "idle", ""])
def test_without_a_request_nothing_is_owned(tmp_path, text):
    write(tmp_path, cpu_max="400000 100000", **({} if text is None else {"cpu_weight": text}))
    assert cgroup_request(V2, BURSTABLE, tmp_path) == 0.0
    assert cgroup_request("", "", tmp_path / "none") == 0.0


def test_the_nearest_cgroup_has_the_request(tmp_path):
    write(tmp_path, kube__cpu_weight="3023", kube__pod__cpu_weight="174")
    assert cgroup_request(V2_POD, "", tmp_path) == pytest.approx(2, rel=0.03)


@pytest.fixture
def v1_cgroup():
    """A cgroup v1 of the `cpu` controller, made for the test."""
    folder = CGROUP_ROOT / "cpu" / f"pdcluster-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup v1 can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize(("shares", "expected"), [(2048, True), (512, False)])
def test_a_process_of_a_real_cgroup_reads_its_request(v1_cgroup, shares, expected):
    (v1_cgroup / "cpu.shares").write_text(str(shares))
    (v1_cgroup / "cpu.cfs_quota_us").write_text("200000")
    script = 'echo $$ > "$0/cgroup.procs" && exec "$1" -c "$2"'
    code = (
        "from pdcluster_worker.system.cpu_cores import wait_environment; "
        "print('GOMP_SPINCOUNT' in wait_environment(2, {}))"
    )
    result = subprocess.run(
        ["sh", "-c", script, v1_cgroup, sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == str(expected)
