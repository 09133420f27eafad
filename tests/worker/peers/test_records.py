"""Records of workers, the members that they make, and calls that have ended."""

import json
import logging
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import pytest

from pdcluster_schema.etcd_keys import command_key, pod_of, role_key, worker_key, workers_prefix
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.peers.calls import answering
from pdcluster_worker.peers.discovery import Membership
from pdcluster_worker.peers.records import WorkerRecord, decode_record, encode_record

KEY = "/pdcluster/ns/chat/workers/r1/decode/main/a"


def test_keys_are_those_of_the_contract() -> None:
    prefix = workers_prefix("ns", "chat", "r1")

    assert worker_key(prefix, "decode", "main", "a") == KEY
    assert pod_of(KEY) == "a"
    assert command_key("ns", "chat", "a") == "/pdcluster/ns/chat/commands/a"
    assert role_key("ns", "chat", "a") == "/pdcluster/ns/chat/commands/a/role"


def test_record_survives_json(record: Callable[..., WorkerRecord]) -> None:
    assert decode_record(KEY, encode_record(record("a"))) == record("a")


def test_record_says_what_the_engine_computes_on_or_nothing(
    record: Callable[..., WorkerRecord],
) -> None:
    told = record("a", device=DeviceFacts("cpu", "Xeon"))
    silent = json.loads(encode_record(record("a")))
    del silent["device"]  # as an older worker writes it

    assert json.loads(encode_record(told))["device"] == {"kind": "cpu", "name": "Xeon"}
    assert decode_record(KEY, encode_record(told)) == told
    noted = record("a", device=DeviceFacts("cuda", "NVIDIA B200", "never run"))
    assert json.loads(encode_record(noted))["device"] == {
        "kind": "cuda",
        "name": "NVIDIA B200",
        "note": "never run",
    }
    assert decode_record(KEY, json.dumps(silent).encode()) == record("a")


def test_unknown_fields_of_a_record_are_ignored(record: Callable[..., WorkerRecord]) -> None:
    value = json.loads(encode_record(record("a"))) | {"later": 1}

    assert decode_record(KEY, json.dumps(value).encode()) == record("a")


@pytest.mark.parametrize(
    "change",
    [{"schema": 2}, {"state": "asleep"}, {"role": "boss"}, {"pod": "b"}, {"engine_id": None}],
)
def test_record_of_another_shape_is_ignored_and_reported(
    record: Callable[..., WorkerRecord], caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    value = json.loads(encode_record(record("a"))) | change

    assert decode_record(KEY, json.dumps(value).encode()) is None
    assert [KEY in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("value", [b"", b"not json", b"[]", b"\xff\xfe", b"{}"])
def test_garbage_is_ignored_and_reported(caplog: pytest.LogCaptureFixture, value: bytes) -> None:
    assert decode_record(KEY, value) is None
    assert len(caplog.messages) == 1


Make = Callable[..., WorkerRecord]


def members_of(*records: WorkerRecord) -> Membership:
    membership = Membership()
    membership.resync({record.pod: record for record in records})
    return membership


def test_membership_takes_a_listing_and_reports_whether_it_changed(record: Make) -> None:
    membership = Membership()

    assert membership.resync({"a": record("a")})
    assert not membership.resync({"a": record("a")})
    assert membership.resync({"a": record("a", state="draining")})
    assert membership.records == {"a": record("a", state="draining")}


def test_member_that_an_empty_listing_lacks_stays_and_is_missing(record: Make) -> None:
    membership = members_of(record("a"), record("b"))

    assert not membership.resync({})
    assert membership.missing == [record("a"), record("b")]
    assert set(membership.records) == {"a", "b"}


def test_missing_member_that_writes_itself_again_is_a_member_again(record: Make) -> None:
    membership = members_of(record("a"))
    membership.delete("a")

    assert not membership.put(record("a"))
    assert membership.missing == []


def test_missing_member_goes_when_its_probe_failed(record: Make) -> None:
    membership = members_of(record("a"), record("b"))
    membership.delete("a")

    assert membership.remove(record("a"))
    assert set(membership.records) == {"b"}
    assert membership.missing == []


def test_probe_of_an_older_record_removes_no_peer(record: Make) -> None:
    membership = members_of(record("a"))
    membership.delete("a")
    restarted = msgspec.structs.replace(record("a"), engine_id="e2")
    membership.put(restarted)
    membership.delete("a")

    assert not membership.remove(record("a"))
    assert membership.missing == [restarted]


def test_drained_member_goes_without_a_probe(record: Make) -> None:
    membership = members_of(record("a", state="drained"))

    assert membership.delete("a")
    assert membership.records == {}


class DeadContext:
    """The context of a call that has no listener any more."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AssertionError(f"{code} {details} was sent to a call that has ended")


async def test_call_that_is_already_over_ends_without_an_answer_or_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Any = DeadContext()
    with caplog.at_level(logging.INFO):
        async with answering(context):
            raise grpc.aio.InternalError("Server already stopped.")

    assert [record.exc_info for record in caplog.records] == [None]
    assert "Server already stopped." in caplog.text
