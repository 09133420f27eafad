"""A real gRPC listener with mutual TLS that answers `verify` as decode workers do."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdcluster_api.discovery.verifier import ClientCertificate
from pdcluster_schema.ports import WORKER_SERVICE
from tests.authorities import new_authority, worker_pair

PASSED = {
    "outcome": "verified",
    "prefill": "p-0",
    "transport": "tcp",
    "num_tokens": 8,
    "num_bytes": 1000,
    "bytes_per_second": 2000,
    "has_checksum": True,
}


def new_certificate() -> ClientCertificate:
    authority = new_authority()
    pair = worker_pair(authority)
    return ClientCertificate(authority.certificate, pair.certificate, pair.key)


@dataclass
class PlayedWorker:
    """One listener for all workers.  answers: the next ones, the last of which stays; None = the
    call ends well without one.
    """

    answers: list[dict[str, Any] | bytes | grpc.StatusCode | None]
    port: int = 0
    requested: list[dict[str, Any]] = field(default_factory=list)
    certificate: ClientCertificate = field(default_factory=new_certificate)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server, pem = grpc.aio.server(), self.certificate
        handler = grpc.unary_stream_rpc_method_handler(self._verify)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(WORKER_SERVICE, {"verify": handler}),)
        )
        credentials = grpc.ssl_server_credentials(
            [(pem.key, pem.certificate)], pem.ca, require_client_auth=True
        )
        self.port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    async def _verify(self, message: bytes, context: Any) -> None:
        self.requested.append(json.loads(message))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "why")
        if answer is not None:
            await context.write(
                answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            )
