"""Thread counts follow cgroup v1 and v2 limits, ancestors included, and affinity."""

import pytest

from pdcluster_worker.system.cgroups import parse_cgroup_paths
from pdcluster_worker.system.cpu_limit import (
    available_threads,
    cgroup_limits,
    parse_cfs,
    parse_cpu_max,
    threads_for,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("", None),
        ("x y", None),
        ("1 0", None),
    ],
)
def test_cpu_max_is_parsed(text, cores):
    assert parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("150000\n", "100000\n", 1.5), ("-1", "100000", None), ("", "", None)],
)
def test_cfs_quota_is_parsed(quota, period, cores):
    assert parse_cfs(quota, period) == cores


def test_cgroup_paths_are_found():
    text = "5:cpu,cpuacct:/kube/pod\n4:memory:/other\n0::/unified\nnonsense\n"
    assert parse_cgroup_paths(text, "cpu") == ("/unified", "/kube/pod")
    assert parse_cgroup_paths(text, "memory") == ("/unified", "/other")
    assert parse_cgroup_paths("", "cpu") == (None, None)


@pytest.mark.parametrize(
    ("num_cores", "limits", "threads"),
    [(8, [], 8), (8, [2.0], 2), (8, [3.5, 2.7], 2), (8, [0.5], 1), (2, [16.0], 2)],
)
def test_threads_are_the_least_limit_rounded_down(num_cores, limits, threads):
    assert threads_for(num_cores, limits) == threads


def test_v2_limits_of_all_ancestors_apply(tmp_path):
    pod = tmp_path / "kube" / "pod"
    pod.mkdir(parents=True)
    (pod / "cpu.max").write_text("max 100000")
    (pod.parent / "cpu.max").write_text("300000 100000")
    assert cgroup_limits("0::/kube/pod\n", tmp_path) == [3.0]


def test_v1_limit_is_read_where_the_container_sees_it(tmp_path):
    folder = tmp_path / "cpu,cpuacct"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("250000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_limits("3:cpu,cpuacct:/not/visible/here\n", tmp_path) == [2.5]


def test_no_cgroup_is_no_limit(tmp_path):
    assert cgroup_limits("", tmp_path) == []


def test_this_machine_gives_at_least_one_thread():
    assert available_threads() >= 1
