"""Deals the files out to the processes of `make test`: results of tests/conftest.py for their
paths.
"""

from tests.conftest import ROOT, group_of, turn_of

SYSTEM = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "tests" / "system").glob("test_*.py"))
]

PURE = "tests/operator/pdctl/local/test_rows.py"


def test_files_that_share_a_cluster_go_together():
    together = {file: group_of(file) for file in SYSTEM if group_of(file) != file}
    assert (
        together["tests/system/test_worker_end.py"]
        == together["tests/system/test_lost_workers.py"]
        == "slow and pair"
    )
    assert (
        together["tests/system/test_unauthenticated_connections.py"]
        == together["tests/system/test_idle.py"]
        == "pair"
    )


def test_a_file_of_its_own_and_files_elsewhere_stand_alone():
    for file in ("tests/system/test_drain.py", "tests/apiserver/test_cel_rules.py", PURE):
        assert (ROOT / file).is_file()
        assert group_of(file) == file


def test_what_takes_long_begins_first():
    files = [
        PURE,
        "tests/apiserver/test_cel_rules.py",
        "tests/system/test_ipv6.py",
        "tests/system/test_idle.py",
    ]
    assert sorted(files, key=turn_of) == files[::-1]


def test_make_test_deals_files_out():
    (options,) = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("SIDE_BY_SIDE")
    ]
    # the order of tests/conftest.py, not by number of tests
    assert "--dist loadfile --no-loadscope-reorder" in options
