"""A report in parts tells the same as the whole."""

import pytest

from pdcluster_worker.messages.peers import Report, WorkerLoad
from pdcluster_worker.routing.prefix_index import PrefixIndex

BLOCKS = tuple(bytes([i]) for i in range(10))


@pytest.mark.parametrize("max_hashes", [1, 2, 3, 4, 7, 10, 13, 14, 100])
@pytest.mark.parametrize("snapshot", [True, False])
def test_parts_end_as_the_whole_report_does(max_hashes: int, snapshot: bool) -> None:
    report = Report(WorkerLoad(), stored=BLOCKS, removed=BLOCKS[3:7], snapshot=snapshot)

    parts = list(report.parts(max_hashes))
    index = PrefixIndex()
    index.snapshot("w", [b"before"])
    for part in parts:
        if part.snapshot:
            index.snapshot("w", ())
        index.apply("w", part.stored, part.removed)

    assert all(len(part.stored) + len(part.removed) <= max_hashes for part in parts)
    assert [part.snapshot for part in parts] == [snapshot] + [False] * (len(parts) - 1)
    assert index.hashes("w") == {*BLOCKS[:3], *BLOCKS[7:]} | (set() if snapshot else {b"before"})


def test_report_of_load_alone_is_one_part() -> None:
    report = Report(WorkerLoad(num_running=3))

    assert list(report.parts(5)) == [report]
