"""A prefill worker that a test scripts to misbehave: writing late, writing nothing, breaking off.

It registers in etcd, speaks gRPC over the cluster's mutual TLS and grants
every credit; it has no engine.  What it writes, `kv_port` writes.
"""

import json
import queue
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import msgspec

from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import (
    ClaimCredit,
    CreditReply,
    PrefillCall,
    PrefillReply,
    Report,
    WorkerLoad,
    decode_credit_call,
    decode_hello,
    decode_prefill,
    encode,
)
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.peers.calls import SERVER_OPTIONS, method_handlers
from tests.system.certificates import Certificates
from tests.system.client import Json
from tests.system.cluster import Cluster

CALL_SECONDS = 30.0


@dataclass
class Call:
    """One Prefill call.  `replies` takes what to answer; None ends the call."""

    prefill: PrefillCall
    replies: "queue.Queue[PrefillReply | None]" = field(default_factory=queue.Queue)
    cancelled: bool = False

    def first_token(self, token_id: int) -> None:
        token = Token(self.prefill.spec.request_id, token_id)
        self.replies.put(PrefillReply(first_token=token))

    def finish(self, checksum: int | None = None) -> None:
        done = PrefillDone(self.prefill.spec.request_id, 1, 0.1, checksum)
        self.replies.put(PrefillReply(done=done))
        self.replies.put(None)


class FakePrefill:
    """A context manager; `calls` gives each Prefill call that arrives."""

    def __init__(self, cluster: Cluster, certificates: Certificates, like: Json) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self.engine_id = uuid.uuid4().hex
        self._cluster = cluster
        self._like = like
        self._key = f"/pdcluster/test/{cluster.name}/workers/r1/prefill/cpu/fake"
        self._open: list[Call] = []
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((method_handlers(self),))
        pair = (certificates.key.read_bytes(), certificates.certificate.read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], certificates.ca.read_bytes(), require_client_auth=True
        )
        self._port = self._server.add_secure_port("127.0.0.1:0", credentials)

    def __enter__(self) -> Self:
        self._server.start()
        address = f"127.0.0.1:{self._port}"
        record = {
            **self._like,
            "pod": "fake",
            "role": "prefill",
            "engine_id": self.engine_id,
            "grpc_address": address,
        }
        self._cluster.etcd.put(self._key, json.dumps(record))
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.etcd.delete(self._key)
        for call in self._open:
            call.replies.put(None)
        self._server.stop(0).wait()
        self._pool.shutdown()

    def next_call(self) -> Call:
        return self.calls.get(timeout=CALL_SECONDS)

    # --- the service --------------------------------------------------------------------------

    def handshake(self, message: bytes, context: Any) -> bytes:
        hello = decode_hello(message)
        return encode(msgspec.structs.replace(hello, engine_id=self.engine_id, role="prefill"))

    def watch(self, message: bytes, context: Any) -> Iterator[bytes]:
        yield encode(Report(WorkerLoad(), snapshot=True, sequence=1))
        ended: queue.Queue[None] = queue.Queue()
        context.add_callback(lambda: ended.put(None))
        ended.get()

    def credits(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for call in map(decode_credit_call, messages):
            if isinstance(call, ClaimCredit):
                yield encode(CreditReply(call.request_id, True))

    def prefill(self, message: bytes, context: Any) -> Iterator[bytes]:
        call = Call(decode_prefill(message))

        def on_end() -> None:
            call.cancelled = True
            call.replies.put(None)

        context.add_callback(on_end)
        self._open.append(call)
        self.calls.put(call)
        while (reply := call.replies.get()) is not None:
            yield encode(reply)
