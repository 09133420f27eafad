"""Looks at workers: the lines and their times, with etcd coming and going."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdcluster_api.discovery.etcd import RegisteredWorker
from pdcluster_api.errors import EtcdUnreachableError, StartError
from pdctl.local import up, watcher
from pdctl.local.processes import Launch, ManagedProcess
from pdctl.local.watcher import Row

RECORD = RegisteredWorker("w", "decode", "cpu", "e1", "ready", {"http": "127.0.0.1:8000"})


class FakeEtcd:
    """Answers reads with these records, or not at all."""

    def __init__(self) -> None:
        self.records: dict[str, RegisteredWorker] | None = {}

    async def read_workers(
        self, endpoints: Sequence[str], prefix: str
    ) -> dict[str, RegisteredWorker]:
        if self.records is None:
            raise EtcdUnreachableError("etcd does not answer")
        return self.records


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    made = FakeEtcd()
    monkeypatch.setattr(watcher, "read_workers", made.read_workers)
    return made


@pytest.fixture
def keeper() -> ManagedProcess:
    made = ManagedProcess(Launch("w", (), Path("/logs/w.log")), lambda text: None)
    made.phase, made.num_starts, made.pid = "running", 1, 7
    return made


async def test_watcher_tells_changes_only_and_keeps_what_it_knew_in_an_outage(
    etcd: FakeEtcd, keeper: ManagedProcess
) -> None:
    told: list[Sequence[Row]] = []
    watched, workers = (
        watcher.Watcher(["e:1"], "/p/", told.append, print),
        [("decode", "cpu", keeper)],
    )
    await watched.prime()
    for records in ({}, {"w": RECORD}, {"w": RECORD}, None):
        etcd.records = records
        await watched.refresh()
        watched.poll(workers)

    assert [[row.state for row in rows] for rows in told] == [["starting"], ["ready"]]
    assert watched.all_ready.is_set()
    assert watched.http_address("w") == "127.0.0.1:8000"


async def test_a_state_that_cannot_be_written_is_reported_once_and_tried_at_each_poll(
    etcd: FakeEtcd, keeper: ManagedProcess
) -> None:
    tries: list[int] = []
    reported: list[str] = []

    def changed(rows: Sequence[Row]) -> None:
        tries.append(len(rows))
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", "state.json")

    watched = watcher.Watcher(["e:1"], "/p/", changed, reported.append)
    for _ in range(4):
        watched.poll([("decode", "cpu", keeper)])

    assert tries == [1, 1, 1]
    assert reported == [
        "cannot write the state: [Errno 28] No space left on device: 'state.json'; the cluster "
        "goes on: free some space"
    ]


async def test_watcher_is_not_fooled_by_records_of_an_earlier_run(
    etcd: FakeEtcd, keeper: ManagedProcess
) -> None:
    etcd.records = {"w": RECORD}
    watched = watcher.Watcher(["e:1"], "/p/", lambda rows: None, print)
    await watched.prime()
    await watched.refresh()
    watched.poll([("decode", "cpu", keeper)])

    assert not watched.all_ready.is_set()


async def test_etcd_that_goes_before_the_workers_start_is_a_start_error(etcd: FakeEtcd) -> None:
    etcd.records = None
    with pytest.raises(StartError, match="etcd does not answer; it answered a moment ago"):
        await up._prime(watcher.Watcher(["e:1"], "/p/", lambda rows: None, print))


def test_port_that_is_not_ours_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int, host: str) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(up, "port_is_free", refuse)
    with pytest.raises(
        StartError,
        match=r"port 80 of 127.0.0.1 cannot be used \(Permission denied\); choose another with ",
    ):
        up._check_port("127.0.0.1", 80)
