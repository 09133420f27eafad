"""Endpoints of users: where they lead is judged before a connection, and never said after."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.certificates.authority import make_authority
from pdcluster_api.discovery.addresses import ResolvedEndpoint, is_refused, resolve
from pdcluster_api.discovery.commands import read_registered
from pdcluster_api.discovery.etcd import EtcdTLS
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests, EtcdTarget
from pdcluster_schema.ports import parse_address
from tests.ports import free_port
from tests.system.etcd_server import EtcdServer

REFUSED = [
    "127.0.0.1",
    "127.8.9.1",
    "0.0.0.0",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "224.0.0.1",
    "::",
    "::1",
    "fe80::1",
    "fd00:ec2::254",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
]
NUMBERS = {"2852039166:80": "169.254.169.254", "0x7f000001:80": "127.0.0.1", "127.1:80": ""}


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_of_the_operator_or_of_a_cloud_is_refused(address: str) -> None:
    assert is_refused(address)
    assert is_refused(address, may_be_loopback=True) != (
        address in ("127.0.0.1", "127.8.9.1", "::1")
    )


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "192.168.1.1", "8.8.8.8", "fd00::1", "2001:db8::1"]
)
def test_an_address_of_a_network_is_taken(address: str) -> None:
    assert not is_refused(address)


@pytest.mark.parametrize("endpoint", [*NUMBERS, "localhost:80", "[::1]:80", "127.0.0.1:80"])
async def test_what_a_name_leads_to_is_judged_however_it_is_written(endpoint: str) -> None:
    with pytest.raises(EtcdUnreachableError) as refused:
        await resolve(endpoint)
    said = str(refused.value)
    assert said.startswith(
        f"{endpoint} is not asked: it leads to a loopback, link-local or metadata"
    )
    assert endpoint in ("127.0.0.1:80",) or "127.0.0.1" not in said


async def test_a_connection_goes_to_the_addresses_that_were_judged() -> None:
    assert await resolve("10.0.0.1:2379") == ResolvedEndpoint("10.0.0.1:2379", "ipv4:10.0.0.1:2379")
    found = await resolve("[fd00::1]:2379")
    assert found == ResolvedEndpoint("[fd00::1]:2379", "ipv6:[fd00::1]:2379")
    assert (str(found), found and found.host) == ("[fd00::1]:2379", "fd00::1")


async def test_a_name_that_leads_nowhere_is_an_etcd_that_does_not_answer() -> None:
    assert await resolve("no-such-host.invalid:2379") is None
    asked = EtcdTarget(Key("default", "chat"), ("no-such-host.invalid:2379",), is_external=True)
    with pytest.raises(EtcdUnreachableError) as said:
        await EtcdRequests(None).registered(asked)
    assert str(said.value) == "etcd does not answer at no-such-host.invalid:2379"


async def test_an_etcd_by_its_name_is_read_over_the_judged_address(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    etcd.start()
    try:
        port = parse_address(etcd.endpoint)[1]
        asked = EtcdTarget(Key("default", "chat"), (f"localhost:{port}",), is_external=True)
        requests = EtcdRequests(None, may_be_loopback=True)
        assert (await requests.registered(asked)).records == {}
        with pytest.raises(EtcdUnreachableError, match="is not asked"):
            await EtcdRequests(None).registered(asked)
    finally:
        etcd.close()


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.readline()
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.fixture
async def places() -> AsyncIterator[dict[str, str]]:
    """Ports that behave differently, none of them an etcd."""
    http = await asyncio.start_server(_http, "127.0.0.1", 0)
    other = grpc.aio.server()
    grpc_port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    unread = socket.create_server(("127.0.0.1", 0))
    yield {
        "HTTP": f"127.0.0.1:{http.sockets[0].getsockname()[1]}",
        "unread": f"127.0.0.1:{unread.getsockname()[1]}",
        "another gRPC server": f"127.0.0.1:{grpc_port}",
        "closed": f"127.0.0.1:{free_port()}",
    }
    unread.close()
    http.close()
    await other.stop(None)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_the_error_is_the_same_for_every_port_that_is_no_etcd(
    places: dict[str, str], has_tls: bool
) -> None:
    tls = EtcdTLS(make_authority(datetime.now(UTC)).certificate) if has_tls else None
    for endpoint in places.values():
        with pytest.raises(EtcdUnreachableError) as said:
            await read_registered([endpoint], "default", "chat", tls)
        assert str(said.value) == f"etcd does not answer at {endpoint}"
