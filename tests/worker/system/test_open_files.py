"""The limit on open files: as a bound of connections, and raised as far as may be."""

import resource
from collections.abc import Iterator

import pytest

from pdcluster_worker.system.process import FILES_OF_RELAYED, allow_more_files, fitting

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = resource.getrlimit(LIMIT)
    yield
    resource.setrlimit(LIMIT, before)


def set_limit(files: int) -> None:
    resource.setrlimit(LIMIT, (files, resource.getrlimit(LIMIT)[1]))


def test_connections_leave_files_for_other_ends():
    set_limit(1024)
    assert (fitting(2048), fitting(100)) == (768, 100)


def test_a_relayed_request_has_several_files():
    set_limit(1024)
    assert fitting(2048, files_each=FILES_OF_RELAYED) == 256


def test_a_limit_below_the_other_ends_leaves_one():
    set_limit(200)
    assert fitting(2048, files_each=FILES_OF_RELAYED) == 1


def test_the_limit_is_raised_and_never_lowered():
    most = resource.getrlimit(LIMIT)[1]
    set_limit(1024)
    allow_more_files()
    raised = resource.getrlimit(LIMIT)
    assert raised == (most if 0 <= most < 65536 else 65536, most)

    allow_more_files()
    assert resource.getrlimit(LIMIT) == raised
