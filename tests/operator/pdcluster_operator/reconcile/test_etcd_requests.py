"""Requests to a given etcd: an error names what is wrong, of etcd or of its Secret."""

import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pdcluster_api.apiserver.errors import ForbiddenError, UnavailableError
from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.certificates.authority import make_authority
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests, EtcdTarget
from pdcluster_schema import etcd_keys
from tests.ports import free_port
from tests.system.etcd_server import EtcdServer

PAIR = make_authority(datetime.now(UTC))


class WrittenSecret:
    """A client that has one Secret, or refuses it."""

    def __init__(self, found: dict[str, bytes] | Exception | None) -> None:
        self.found = found

    async def find(self, kind: object, namespace: str, name: str) -> dict[str, Any] | None:
        assert (str(kind), namespace, name) == ("Secret", "default", "etcd")
        if isinstance(self.found, Exception):
            raise self.found
        data = self.found and {
            key: base64.b64encode(value).decode() for key, value in self.found.items()
        }
        return None if data is None else {"metadata": {"name": name}, "data": data}


KEY = Key("default", "chat")


def target(*, tls: bool = True) -> EtcdTarget:
    return EtcdTarget(KEY, (f"127.0.0.1:{free_port()}",), "etcd" if tls else None, is_external=True)


async def test_an_endpoint_that_is_dead_is_named():
    asked = target(tls=False)
    with pytest.raises(EtcdUnreachableError, match=asked.endpoints[0]):
        await EtcdRequests(WrittenSecret(None), may_be_loopback=True).registered(asked)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "Secret etcd does not exist"),
        ({"tls.crt": PAIR.certificate}, "ca.crt is not a PEM certificate"),
        (
            ForbiddenError("secrets is forbidden"),
            "Secret etcd cannot be read: secrets is forbidden",
        ),
    ],
)
async def test_a_secret_that_cannot_be_used_is_reported_and_no_client_certificate_is_known(
    found: Any, message: str
):
    requests = EtcdRequests(WrittenSecret(found))
    with pytest.raises(EtcdUnreachableError, match=message):
        await requests.registered(target())
    assert await requests.has_client_certificate(target()) is None


@pytest.mark.parametrize(
    ("more", "has"),
    [({}, False), ({"tls.crt": PAIR.certificate, "tls.key": PAIR.key}, True)],
    ids=["without", "with"],
)
async def test_the_secret_says_whether_workers_show_a_certificate_too(
    more: dict[str, bytes], has: bool
):
    requests = EtcdRequests(WrittenSecret({"ca.crt": PAIR.certificate, **more}))
    assert await requests.has_client_certificate(target()) is has


class Pods:
    """A client of an API server that has no pods, and goes away after so many answers; None = it
    stays.
    """

    def __init__(self, answers: int | None) -> None:
        self.answers = answers

    async def list(
        self, kind: object, namespace: str, *, fields: str
    ) -> AsyncIterator[dict[str, Any]]:
        if self.answers is not None:
            if not self.answers:
                raise UnavailableError("the API server is away")
            self.answers -= 1
        for pod in ():
            yield pod


@pytest.mark.parametrize("answers", [0, 1])
async def test_ghosts_are_not_removed_while_the_api_server_cannot_list(
    tmp_path: Path, answers: int
):
    """Neither those of which it had said so before it went."""
    etcd = EtcdServer(tmp_path)
    etcd.start()
    record = json.dumps(
        {
            "engine_id": "e1",
            "state": "ready",
            "http_address": "h:1",
            "grpc_address": "h:2",
            "kv_address": "h:3",
        }
    )
    prefix = etcd_keys.workers_prefix("default", "chat", "r1")
    records = {etcd_keys.worker_key(prefix, "decode", "cpu", pod) for pod in ("ghost-0", "ghost-1")}
    try:
        for key in records:
            etcd.put(key, record)
        asked = EtcdTarget(KEY, (etcd.endpoint,))
        found = (await EtcdRequests(Pods(None)).registered(asked)).records.values()
        with pytest.raises(UnavailableError):
            await EtcdRequests(Pods(answers)).remove(asked, found)
        assert etcd.values(prefix).keys() == records
        assert await EtcdRequests(Pods(None)).remove(asked, found) == ["ghost-0", "ghost-1"]
        assert not etcd.values(prefix)
    finally:
        etcd.close()
