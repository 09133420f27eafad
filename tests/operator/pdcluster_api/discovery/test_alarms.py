"""A real etcd without room: it is read, takes nothing, and says so until its alarm is ended."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from httpx import HTTPStatusError

from pdcluster_api.discovery.commands import is_full, read_registered
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_schema import etcd_keys
from tests.ports import free_port
from tests.system.etcd_server import EtcdServer

QUOTA_BYTES = 2 << 20
FILLER = "x" * (1 << 18)


def fill(server: EtcdServer) -> None:
    for _ in range(2 * QUOTA_BYTES // len(FILLER)):
        server.put("/x/filler", FILLER)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that was filled beyond its quota, by a key of no cluster."""
    server = EtcdServer(tmp_path, [f"--quota-backend-bytes={QUOTA_BYTES}"])
    server.start()
    server.put(etcd_keys.command_key("default", "chat", "pod-0"), "{}")
    with pytest.raises(HTTPStatusError):
        fill(server)
    yield server
    server.close()


async def test_a_full_etcd_is_read_and_known_as_full_until_its_alarm_is_ended(
    full: EtcdServer,
) -> None:
    found = await read_registered([full.endpoint], "default", "chat")
    assert (found.is_full, list(found.commands)) == (True, ["pod-0"])

    full.kill()
    full.start()
    assert await is_full([full.endpoint])  # the alarm is in its data

    full.end_alarm()
    assert not (await read_registered([full.endpoint], "default", "chat")).is_full


async def test_an_etcd_that_keeps_its_alarms_to_itself_is_not_known_as_full() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert not await is_full([f"127.0.0.1:{port}"])
    finally:
        await server.stop(None)


async def test_an_etcd_that_does_not_answer_is_another_fault() -> None:
    dead = f"127.0.0.1:{free_port()}"
    assert not await is_full([dead])
    with pytest.raises(EtcdUnreachableError):
        await read_registered([dead], "default", "chat")
