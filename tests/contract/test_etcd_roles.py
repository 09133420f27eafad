"""An etcd with access control: the documented roles suffice for the operator and the workers."""

import json
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from aetcd import rpc

from pdcluster_api.discovery.commands import read_registered, remove_records, write_commands
from pdcluster_api.discovery.etcd import EtcdTLS, check_reachable
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_schema import etcd_keys
from pdcluster_schema.etcd_keys import dtype_key
from pdcluster_worker.peers.etcd import Etcd, EtcdError
from tests.tls_etcd import TlsEtcd, client_of, tls_etcd

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "external-etcd.yaml"
NAMESPACE, NAME = "default", "shared-etcd"
RECORDS = etcd_keys.records_prefix(NAMESPACE, NAME)
OWN = etcd_keys.worker_key(
    etcd_keys.workers_prefix(NAMESPACE, NAME, "r1"), "decode", "cpu", "pod-0"
)
RECORD = json.dumps(
    {
        "engine_id": "e1",
        "state": "ready",
        "http_address": "h:1",
        "grpc_address": "h:2",
        "kv_address": "h:3",
    }
)
MEBIBYTE = 1 << 20
PERMISSIONS = {"read": rpc.Permission.READ, "readwrite": rpc.Permission.READWRITE}


@asynccontextmanager
async def connected(etcd: TlsEtcd, user: str) -> AsyncIterator[grpc.aio.Channel]:
    pair = client_of(etcd.authority, user)
    credentials = grpc.ssl_channel_credentials(
        etcd.authority.certificate, pair.key, pair.certificate
    )
    async with grpc.aio.secure_channel(etcd.endpoint, credentials) as channel:
        yield channel


def documented() -> list[list[str]]:
    """The words of each `etcdctl` line of the example."""
    lines = [
        line.removeprefix("#").strip()
        for line in EXAMPLE.read_text().splitlines()
        if line.startswith("#   etcdctl")
    ]
    return [shlex.split(line)[1:] for line in lines]


async def carry_out(auth: rpc.AuthStub, words: list[str]) -> None:
    """Run the requests that `etcdctl` would send."""
    match words:
        case ["role", "add", role]:
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name=role))
        case ["role", "grant-permission", "--prefix=true", role, kind, prefix]:
            end = f"{prefix[:-1]}0".encode()
            allowed = rpc.Permission(permType=PERMISSIONS[kind], key=prefix.encode(), range_end=end)
            await auth.RoleGrantPermission(
                rpc.AuthRoleGrantPermissionRequest(name=role, perm=allowed)
            )
        case ["user", "add", user, "--no-password"]:
            options = rpc.AuthUserAddRequest.DESCRIPTOR.fields_by_name[
                "options"
            ].message_type._concrete_class(no_password=True)
            await auth.UserAdd(rpc.AuthUserAddRequest(name=user, options=options))
        case ["user", "grant-role", user, role]:
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=role))
        case _:
            raise AssertionError(f"the test knows no {words}")


async def set_up(etcd: TlsEtcd) -> None:
    """Other clusters' keys, more than a message of gRPC holds; the documented users, and one for
    each role; access control on.
    """
    lines = [*documented(), ["role", "add", "root"]]
    for user, role in (
        ("root", "root"),
        ("worker", f"{NAME}-worker"),
        ("operator", f"{NAME}-operator"),
    ):
        lines += [["user", "add", user, "--no-password"], ["user", "grant-role", user, role]]
    async with connected(etcd, "root") as channel:
        for number in range(5):
            await rpc.KVStub(channel).Put(
                rpc.PutRequest(
                    key=f"/pdcluster/other/{number}/workers/x".encode(), value=bytes(MEBIBYTE)
                )
            )
        for words in lines:
            await carry_out(rpc.AuthStub(channel), words)
        await rpc.AuthStub(channel).AuthEnable(rpc.AuthEnableRequest())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsEtcd]:
    with tls_etcd(tmp_path_factory.mktemp("etcd"), asks_clients=True) as found:
        yield found


@pytest.fixture
async def etcd(running: TlsEtcd, request: pytest.FixtureRequest) -> TlsEtcd:
    """With access control, which one test at least turns on."""
    if not getattr(request.module, "is_set_up", False):
        await set_up(running)
        request.module.is_set_up = True
    return running


def shown(etcd: TlsEtcd, user: str) -> EtcdTLS:
    pair = client_of(etcd.authority, user)
    return EtcdTLS(etcd.authority.certificate, pair.certificate, pair.key)


@asynccontextmanager
async def worker(etcd: TlsEtcd, user: str) -> AsyncIterator[Etcd]:
    tls = shown(etcd, user)
    async with Etcd(
        etcd.endpoint, 5.0, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    ) as client:
        yield client


@pytest.mark.parametrize("user", [NAME, "operator", "root"])
async def test_it_is_reachable_with_the_least_rights_and_among_megabytes_of_others(
    etcd: TlsEtcd, user: str
) -> None:
    await check_reachable([etcd.endpoint], RECORDS, shown(etcd, user))


@pytest.mark.parametrize("prefix", [etcd_keys.ROOT, etcd_keys.records_prefix(NAMESPACE, "other")])
async def test_keys_of_others_are_refused(etcd: TlsEtcd, prefix: str) -> None:
    with pytest.raises(EtcdUnreachableError, match="etcdserver: permission denied"):
        await check_reachable([etcd.endpoint], prefix, shown(etcd, NAME))


@pytest.mark.parametrize(
    ("of_worker", "of_operator"),
    [(NAME, NAME), ("worker", "operator")],
    ids=["one user", "a user for each role"],
)
async def test_workers_register_and_watch_and_the_operator_commands_and_removes(
    etcd: TlsEtcd, of_worker: str, of_operator: str
) -> None:
    command, endpoints, tls = (
        etcd_keys.command_key(NAMESPACE, NAME, "pod-0"),
        [etcd.endpoint],
        shown(etcd, of_operator),
    )
    async with worker(etcd, of_worker) as client:
        lease = await client.grant(30)
        await client.put(OWN, RECORD.encode(), lease)
        listing = await client.read(etcd_keys.workers_prefix(NAMESPACE, NAME, "r1"))
        assert [*listing.values] == [OWN]
        assert not (await client.read(command)).values
        watch = client.watch(command, listing.revision + 1)
        await write_commands(
            endpoints, NAMESPACE, NAME, drain={"pod-0": datetime.now(UTC)}, tls=tls
        )
        assert await anext(watch) == []  # it has begun
        assert [event.key for event in await anext(watch)] == [command]
        await watch.aclose()
        found = await read_registered(endpoints, NAMESPACE, NAME, tls)
        assert ([*found.records], [*found.commands]) == (["pod-0"], ["pod-0"])
        assert await remove_records(endpoints, found.records.values(), tls) == ["pod-0"]
        await write_commands(endpoints, NAMESPACE, NAME, drain={}, serve=["pod-0"], tls=tls)
        await client.put(OWN, RECORD.encode(), lease)
        await client.keep_alive(lease)
        await client.revoke(lease)
    found = await read_registered(endpoints, NAMESPACE, NAME, tls)
    assert (found.records, found.commands) == ({}, {})


async def test_workers_of_a_revision_agree_on_a_dtype_with_their_role(etcd: TlsEtcd) -> None:
    key = dtype_key(NAMESPACE, NAME, "r1")
    async with worker(etcd, "worker") as client:
        assert [await client.create(key, dtype) for dtype in (b"float32", b"bfloat16")] == [
            b"float32"
        ] * 2


async def test_the_role_of_workers_writes_no_commands(etcd: TlsEtcd) -> None:
    async with worker(etcd, "worker") as client:
        lease = await client.grant(30)
        with pytest.raises(EtcdError, match="permission denied"):
            await client.put(etcd_keys.command_key(NAMESPACE, NAME, "pod-0"), b"{}", lease)
        await client.revoke(lease)


def test_the_page_and_the_example_show_the_same_roles() -> None:
    page = [
        line.strip()
        for line in (EXAMPLE.parents[1] / "docs" / "operations.md").read_text().splitlines()
    ]
    lines = [shlex.split(line)[1:] for line in page if line.startswith("etcdctl ")]
    assert [[word.replace("chat", NAME) for word in words] for words in lines] == documented()
