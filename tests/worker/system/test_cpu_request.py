"""A CPU request is read from the container's cgroup, v1 or v2, and is never overestimated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_worker.system.cgroups import CGROUP_ROOT
from pdcluster_worker.system.cpu_limit import cgroup_limits
from pdcluster_worker.system.cpu_request import cgroup_request, cores_of_weight
from pdcluster_worker.system.spin_policy import own_cores, spins

V2 = "0::/\n"
GUARANTEED, BURSTABLE, BEST_EFFORT = "-997\n", "870\n", "1000\n"


def container(root: Path, **files: str) -> Path:
    """The cgroup's folder that a container of cgroup v2 sees."""
    for name, text in files.items():
        (root / name.replace("_", ".")).write_text(f"{text}\n")
    return root


def spins_with(threads: int, root: Path, oom_score: str, proc_cgroup: str = V2) -> bool:
    limits = cgroup_limits(proc_cgroup, root)
    return spins(threads, own_cores({}, limits, cgroup_request(proc_cgroup, oom_score, root)))


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


@pytest.mark.parametrize("weight", ["79", "174"], ids=["older-runtime", "runtime"])
def test_a_guaranteed_pod_spins_up_to_its_limit(tmp_path, weight):
    container(tmp_path, cpu_max="200000 100000", cpu_weight=weight)
    assert spins_with(2, tmp_path, GUARANTEED)
    assert not spins_with(3, tmp_path, GUARANTEED)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("174", True), ("138", False), ("100", False), ("80", False), ("79", False), ("17", False)],
    ids=["2", "1.5", "1", "0.75", "2-older-runtime", "0.1"],
)
def test_a_burstable_pod_spins_where_its_request_covers_the_threads(tmp_path, weight, expected):
    container(tmp_path, cpu_max="200000 100000", cpu_weight=weight)
    assert spins_with(2, tmp_path, BURSTABLE) is expected


def test_a_request_without_a_limit_is_enough(tmp_path):
    container(tmp_path, cpu_max="max 100000", cpu_weight="303")
    assert spins_with(4, tmp_path, BURSTABLE)
    assert not spins_with(5, tmp_path, BURSTABLE)


def test_an_oom_score_alone_gives_no_cores(tmp_path):
    container(tmp_path, cpu_max="max 100000", cpu_weight="100")
    assert not spins_with(2, tmp_path, GUARANTEED)


@pytest.mark.parametrize("limit", ["max", "800000"])
def test_a_pod_that_requests_nothing_does_not_spin(tmp_path, limit):
    container(tmp_path, cpu_max=f"{limit} 100000", cpu_weight="1")
    assert not spins_with(2, tmp_path, BEST_EFFORT)


@pytest.mark.parametrize("text", [None, "idle", ""])
def test_without_a_request_nothing_is_owned(tmp_path, text):
    container(tmp_path, cpu_max="400000 100000", **({} if text is None else {"cpu_weight": text}))
    assert cgroup_request(V2, BURSTABLE, tmp_path) == 0.0
    assert cgroup_request("", "", tmp_path / "none") == 0.0


def test_the_nearest_cgroup_has_the_request(tmp_path):
    own = tmp_path / "kubepods" / "pod"
    own.mkdir(parents=True)
    container(tmp_path / "kubepods", cpu_weight="3023")
    container(own, cpu_weight="174")
    assert cgroup_request("0::/kubepods/pod\n", "", tmp_path) == pytest.approx(2, rel=0.03)


def test_shares_of_v1_are_read_where_the_container_sees_them(tmp_path):
    (tmp_path / "cpu,cpuacct").mkdir()
    container(tmp_path / "cpu,cpuacct", cpu_shares="2560")
    assert cgroup_request("3:cpu,cpuacct:/not/visible/here\n", BURSTABLE, tmp_path) == 2.5


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
        "from pdcluster_worker.system.spin_policy import wait_environment; "
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
