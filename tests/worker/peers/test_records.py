"""Keys of docs/contracts.md; values that are not ours are ignored and logged."""

import json
from collections.abc import Callable

import pytest

from pdcluster_schema.etcd_keys import command_key, pod_of, worker_key, workers_prefix
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.peers.records import WorkerRecord, decode_record, encode_record

KEY = "/pdcluster/ns/chat/workers/r1/decode/main/a"


def test_keys_are_those_of_the_contract() -> None:
    prefix = workers_prefix("ns", "chat", "r1")

    assert worker_key(prefix, "decode", "main", "a") == KEY
    assert pod_of(KEY) == "a"
    assert command_key("ns", "chat", "a") == "/pdcluster/ns/chat/commands/a"


def test_record_survives_json(record: Callable[..., WorkerRecord]) -> None:
    assert decode_record(KEY, encode_record(record("a"))) == record("a")


def test_record_of_a_starting_worker_has_no_engine_yet(record: Callable[..., WorkerRecord]) -> None:
    starting = record("a", engine_id="", state="starting")

    assert decode_record(KEY, encode_record(starting)) == starting


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
def test_record_of_another_shape_is_ignored_and_said(
    record: Callable[..., WorkerRecord], caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    value = json.loads(encode_record(record("a"))) | change

    assert decode_record(KEY, json.dumps(value).encode()) is None
    assert [KEY in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("value", [b"", b"not json", b"[]", b"\xff\xfe", b"{}"])
def test_garbage_is_ignored_and_said(caplog: pytest.LogCaptureFixture, value: bytes) -> None:
    assert decode_record(KEY, value) is None
    assert len(caplog.messages) == 1
