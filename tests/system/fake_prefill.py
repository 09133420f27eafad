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

from pdcluster_worker.peers.options import SERVER_OPTIONS
from pdcluster_worker.proto import worker_pb2 as pb
from pdcluster_worker.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.system.certificates import Certificates
from tests.system.client import Json
from tests.system.cluster import Cluster

CALL_SECONDS = 30.0


@dataclass
class Call:
    """One Prefill call.  `replies` takes what to answer; None ends the call."""

    request: pb.PrefillRequest
    replies: "queue.Queue[pb.PrefillReply | None]" = field(default_factory=queue.Queue)
    cancelled: bool = False

    def first_token(self, token_id: int) -> None:
        """Answer the first token."""
        self.replies.put(pb.PrefillReply(first_token=pb.Token(token_id=token_id)))

    def finish(self, checksum: int | None = None) -> None:
        """Claim that all is written, and end the call."""
        self.replies.put(
            pb.PrefillReply(done=pb.PrefillDone(num_bytes=1, seconds=0.1, checksum=checksum))
        )
        self.replies.put(None)


class FakePrefill(WorkerServicer):
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
        add_WorkerServicer_to_server(self, self._server)
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
        """Wait for the next Prefill call."""
        return self.calls.get(timeout=CALL_SECONDS)

    # --- the service --------------------------------------------------------------------------

    def Handshake(self, request: pb.Hello, context: Any) -> pb.Hello:
        """Claim to be the same as the caller."""
        hello = pb.Hello()
        hello.CopyFrom(request)
        hello.engine_id, hello.role = self.engine_id, "prefill"
        return hello

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WorkerReport]:
        """One report, then silence for as long as the caller listens."""
        yield pb.WorkerReport(sequence=1, snapshot=True, load=pb.Load(state="ready"))
        ended: queue.Queue[None] = queue.Queue()
        context.add_callback(lambda: ended.put(None))
        ended.get()

    def Credits(
        self, request_iterator: Iterator[pb.CreditRequest], context: Any
    ) -> Iterator[pb.CreditReply]:
        """Grant everything."""
        for request in request_iterator:
            if request.WhichOneof("request") == "want":
                yield pb.CreditReply(request_id=request.want.request_id, granted=True)

    def Generate(self, request_iterator: Iterator[pb.Frame], context: Any) -> Iterator[pb.Frame]:
        """Not called: no worker sends this to a prefill worker."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a prefill worker")
        return iter(())

    def Prefill(self, request: pb.PrefillRequest, context: Any) -> Iterator[pb.PrefillReply]:
        """Hand the call to the test and answer what it says."""
        call = Call(request)

        def on_end() -> None:
            call.cancelled = True
            call.replies.put(None)

        context.add_callback(on_end)
        self._open.append(call)
        self.calls.put(call)
        while (reply := call.replies.get()) is not None:
            yield reply
