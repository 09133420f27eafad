"""Commands and records in a real etcd: read together, written in order, removed only as they were
read.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from pdcluster_api.discovery.commands import (
    MAX_OPERATIONS,
    Registered,
    read_registered,
    remove_records,
    write_commands,
)
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_schema import etcd_keys
from tests.ports import free_port
from tests.system.etcd_server import EtcdServer

PREFIX = etcd_keys.cluster_prefix("default", "chat")
RECORD = json.dumps(
    {
        "engine_id": "e1",
        "state": "ready",
        "http_address": "h:1",
        "grpc_address": "h:2",
        "kv_address": "h:3",
    }
)
SINCE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEAD = f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    found = EtcdServer(tmp_path_factory.mktemp("etcd"))
    found.start()
    yield found
    found.close()


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[EtcdServer]:
    """Empty at first."""
    yield server
    for key in server.values("/pdcluster/"):
        server.delete(key)


def key_of(pod: str, revision: str = "r1") -> str:
    return etcd_keys.worker_key(
        etcd_keys.workers_prefix("default", "chat", revision), "decode", "cpu", pod
    )


async def read(etcd: EtcdServer) -> Registered:
    return await read_registered([DEAD, etcd.endpoint], "default", "chat")


async def test_records_of_all_revisions_and_commands_are_read_at_once_and_strangers_ignored(
    etcd: EtcdServer,
):
    etcd.put(key_of("pod-0"), RECORD)
    etcd.put(key_of("pod-1", "r2"), RECORD)
    etcd.put(key_of("broken"), "{")
    etcd.put(f"{PREFIX}stray", RECORD)
    etcd.put(etcd_keys.command_key("default", "chat-2", "pod-9"), "{}")
    etcd.put(
        etcd_keys.worker_key(
            etcd_keys.workers_prefix("default", "chat-2", "r1"), "decode", "cpu", "pod-9"
        ),
        RECORD,
    )
    etcd.put(
        etcd_keys.command_key("default", "chat", "pod-0"), json.dumps({"since": SINCE.isoformat()})
    )
    for pod, value in {
        "by-hand": "drain",
        "a-list": "[]",
        "local": '{"since": "2026-01-02T03:04:05"}',
        "number": '{"since": 5}',
    }.items():
        etcd.put(etcd_keys.command_key("default", "chat", pod), value)
    found = await read(etcd)
    assert {pod: (stored.key, stored.record.state) for pod, stored in found.records.items()} == {
        "pod-0": (key_of("pod-0"), "ready"),
        "pod-1": (key_of("pod-1", "r2"), "ready"),
    }
    assert found.commands == {
        "pod-0": SINCE,
        "by-hand": None,
        "a-list": None,
        "local": None,
        "number": None,
    }


async def test_commands_are_written_with_their_time_and_taken_back(etcd: EtcdServer):
    await write_commands(
        [DEAD, etcd.endpoint], "default", "chat", drain={"pod-1": SINCE, "pod-2": SINCE}
    )
    await write_commands(
        [etcd.endpoint],
        "default",
        "chat",
        drain={"pod-3": SINCE},
        serve=["pod-1", "pod-3", "no-such-pod"],
    )
    assert (await read(etcd)).commands == {"pod-2": SINCE, "pod-3": SINCE}


async def test_a_command_has_the_grace_period_of_its_pod(etcd: EtcdServer):
    drain, graces = {"pod-1": SINCE, "pod-2": SINCE}, {"pod-1": 25, "pod-3": 5}
    await write_commands([etcd.endpoint], "default", "chat", drain=drain, graces=graces)
    etcd.put(etcd_keys.command_key("default", "chat", "by-hand"), '{"graceSeconds": -1}')
    found = await read(etcd)
    assert (found.commands["pod-1"], found.graces) == (SINCE, {"pod-1": 25})


async def test_role_commands_are_no_drain_commands_and_are_taken_back(etcd: EtcdServer):
    roles: dict[str, str | None] = {"pod-1": "decode", "pod-2": "prefill"}
    await write_commands([etcd.endpoint], "default", "chat", drain={"pod-2": SINCE}, roles=roles)
    etcd.put(key_of("pod-1"), json.dumps({**json.loads(RECORD), "pod_role": "prefill"}))
    etcd.put(key_of("pod-2"), json.dumps({**json.loads(RECORD), "pod_role": None}))
    found = await read(etcd)
    assert (found.commands, found.roles) == ({"pod-2": SINCE}, roles)
    assert found.serves == {"pod-1": "decode"}
    assert etcd.values(etcd_keys.role_key("default", "chat", "pod-1")) == {
        etcd_keys.role_key("default", "chat", "pod-1"): b"decode"
    }
    await write_commands(
        [etcd.endpoint], "default", "chat", drain={}, roles={"pod-1": None, "gone": None}
    )
    assert (await read(etcd)).roles == {"pod-2": "prefill"}


async def test_more_commands_than_one_transaction_takes_are_written_too(etcd: EtcdServer):
    pods = [f"pod-{number}" for number in range(MAX_OPERATIONS + 30)]
    await write_commands([etcd.endpoint], "default", "chat", drain=dict.fromkeys(pods, SINCE))
    assert len((await read(etcd)).commands) == len(pods)
    await write_commands([etcd.endpoint], "default", "chat", drain={}, serve=pods)
    assert (await read(etcd)).commands == {}


async def test_a_record_that_was_written_again_is_not_removed(etcd: EtcdServer):
    etcd.put(key_of("gone"), RECORD)
    etcd.put(key_of("back"), RECORD)
    found = await read(etcd)
    etcd.put(key_of("back"), RECORD)
    etcd.put(key_of("new"), RECORD)
    assert await remove_records([etcd.endpoint], found.records.values()) == ["gone"]
    assert set((await read(etcd)).records) == {"back", "new"}
    assert await remove_records([etcd.endpoint], [found.records["gone"]]) == []


async def test_more_records_than_grpc_takes_by_itself_are_read(etcd: EtcdServer):
    long = json.dumps({**json.loads(RECORD), "padding": "x" * (1 << 20)})
    pods = [f"pod-{number}" for number in range(5)]
    for pod in pods:
        etcd.put(key_of(pod), long)
    assert set((await read(etcd)).records) == set(pods)


async def test_an_etcd_that_is_away_is_an_error_and_nothing_else():
    for talk in (
        read_registered([DEAD], "default", "chat"),
        write_commands([DEAD], "default", "chat", drain={"pod-0": SINCE}),
    ):
        with pytest.raises(EtcdUnreachableError, match=f"etcd does not answer at {DEAD}"):
            await talk
