"""Memory of a process follows cgroup v1 and v2 limits, ancestors included, and the machine's."""

import psutil

from pdcluster_worker.system.memory_limit import cgroup_memory_limits, memory_limit


def test_v2_limits_of_all_ancestors_apply(tmp_path):
    pod = tmp_path / "kube" / "pod"
    pod.mkdir(parents=True)
    (pod / "memory.max").write_text("max\n")
    (pod.parent / "memory.max").write_text("4294967296\n")
    assert cgroup_memory_limits("0::/kube/pod\n", tmp_path) == [4 << 30]


def test_v1_limit_is_read_where_the_container_sees_it(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    assert cgroup_memory_limits("4:memory:/kube/pod\n3:cpu:/x\n", tmp_path) == [1 << 30]


def test_without_cgroups_there_is_no_limit_of_theirs(tmp_path):
    assert cgroup_memory_limits("", tmp_path) == []


def test_this_process_has_at_most_the_memory_of_the_machine():
    found = memory_limit()
    assert found is not None
    assert 0 < found <= psutil.virtual_memory().total
