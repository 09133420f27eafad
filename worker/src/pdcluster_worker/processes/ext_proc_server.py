"""The gRPC server of an endpoint picker: Envoy's external processing, and gRPC's health check."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc

from pdcluster_worker.peers.calls import SERVER_OPTIONS, Context, bind
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.proxy.endpoint_picker import EndpointPicker, Exchange
from pdcluster_worker.proxy.ext_proc_messages import health, parse_health

GRACE_SECONDS = 5.0
CONNECTION_SECONDS = 60.0
"""Age of a gateway's connection; then it makes another, maybe to another picker: a Service chooses
by connection, and this one's revision may serve no more.
"""


MAX_STREAMS = 4096
"""Requests of gateways at a time, of which each holds a body; more are refused."""


class ExtProcServer:
    def __init__(self, picker: EndpointPicker, is_draining: Callable[[], bool]) -> None:
        self._picker = picker
        self._is_draining = is_draining
        self._server = grpc.aio.server(
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_connection_age_ms", int(CONNECTION_SECONDS * 1000)),
                ("grpc.max_connection_age_grace_ms", int(CONNECTION_SECONDS * 1000)),
            ],
            maximum_concurrent_rpcs=MAX_STREAMS,
        )
        self._server.add_generic_rpc_handlers(tuple(self._handlers()))

    def _handlers(self) -> "Iterator[grpc.GenericRpcHandler[Any, Any]]":
        methods = {
            "envoy.service.ext_proc.v3.ExternalProcessor": {
                "Process": grpc.stream_stream_rpc_method_handler(self._process)
            },
            "grpc.health.v1.Health": {"Check": grpc.unary_unary_rpc_method_handler(self._check)},
        }
        for service, found in methods.items():
            yield grpc.method_handlers_generic_handler(service, found)

    async def start(self, host: str, port: int, credentials: Credentials) -> int:
        """Returns the port.  Gateways show no certificate.  Raises ConfigError."""
        bound = bind(self._server, "listen.picker", host, port, credentials.server(of_peers=False))
        await self._server.start()
        return bound

    async def close(self) -> None:
        """Take no more requests, and choose for those that have come."""
        await self._server.stop(GRACE_SECONDS)

    async def _process(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """One request of a gateway, which goes on by itself after a stream without an error."""
        exchange = Exchange(self._picker)
        try:
            async with asyncio.timeout(self._picker.stream_seconds):
                async for message in requests:
                    for answer in exchange.take(message):
                        await context.write(answer)
                    if exchange.has_ended:
                        return
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the body takes too long")
        except ValueError as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        finally:
            exchange.close()

    async def _check(self, message: bytes, context: Context) -> bytes:
        return health(is_serving=not self._is_draining() or parse_health(message) == "liveness")
