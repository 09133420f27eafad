"""The gRPC service between workers, in MessagePack: only workers of one revision call each other.

gRPC passes bytes, which each side decodes: gRPC would hide the reason of a failed decoding.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from pdcluster_schema.ports import WORKER_NAME, WORKER_SERVICE
from pdcluster_worker.errors import PeerError
from pdcluster_worker.peers.status import cancelled_locally, error_of

if TYPE_CHECKING:
    StreamingCall = grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]

ReplyT = TypeVar("ReplyT")
Options = list[tuple[str, Any]]

MAX_MESSAGE_BYTES = 64 << 20
"""Holds a prompt of 128k tokens (5 bytes each at most) many times; a prefix cache goes in parts."""

# Pings in both directions find a peer that vanished without closing its connection within about
# the sum; the server permits them that often.
KEEPALIVE_SECONDS = 5.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0

_COMMON: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # pings beside the data, to size windows: a tenth of what a small answer costs
    ("grpc.http2.bdp_probe", 0),
    # of a window instead; a megabyte a round trip is ample within a cluster
    ("grpc.http2.lookahead_bytes", 1 << 20),
]

SERVER_OPTIONS: Options = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # two workers on one port is a mistake that must be seen
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 1000 / 2)),
]

CHANNEL_OPTIONS: Options = [
    *_COMMON,
    # workers are known by their CA and engine id, not by their address
    ("grpc.ssl_target_name_override", WORKER_NAME),
    ("grpc.enable_http_proxy", 0),  # peers are in the cluster, whatever the environment says
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the bound of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # a retry, and where, is decided in `serving`
]


def open_channel(address: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    """A channel to a worker at host:port; it connects by itself and must be closed."""
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class WorkerStub:
    """Methods of the service on a channel, asyncio's or not; messages are bytes.

    handshake:   once per pair and before anything else: Hello, answered by a Hello.
    generate:    to a decode or mixed worker, one for all requests of the pair: `messages.generate`.
    prefill:     to a prefill worker: PrefillCall, answered by PrefillReplies.
    push_prefix: to a prefill worker before a prefill: PushPrefix, answered by a TransferTarget,
                 then PrefixPushed.
    credits:     from a decode to a prefill worker while the pair lives: OpenCredits, then
                 ClaimCredit and ReleaseCredit, answered by CreditReplies.
    watch:       WatchCall, answered by Reports.
    verify:      from the operator or pdctl to a decode worker, in JSON (docs/contracts.md).
    """

    def __init__(self, channel: Any) -> None:
        self.handshake = channel.unary_unary(f"/{WORKER_SERVICE}/handshake")
        self.generate = channel.stream_stream(f"/{WORKER_SERVICE}/generate")
        self.prefill = channel.unary_stream(f"/{WORKER_SERVICE}/prefill")
        self.push_prefix = channel.stream_stream(f"/{WORKER_SERVICE}/push_prefix")
        self.credits = channel.stream_stream(f"/{WORKER_SERVICE}/credits")
        self.watch = channel.unary_stream(f"/{WORKER_SERVICE}/watch")


def method_handlers(service: Any) -> "grpc.GenericRpcHandler[Any, Any]":
    kinds = {
        "handshake": grpc.unary_unary_rpc_method_handler,
        "generate": grpc.stream_stream_rpc_method_handler,
        "prefill": grpc.unary_stream_rpc_method_handler,
        "push_prefix": grpc.stream_stream_rpc_method_handler,
        "credits": grpc.stream_stream_rpc_method_handler,
        "watch": grpc.unary_stream_rpc_method_handler,
        "verify": grpc.unary_stream_rpc_method_handler,
    }
    handlers = {
        name: kind(getattr(service, name)) for name, kind in kinds.items() if hasattr(service, name)
    }
    return grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers)


class Replies(AsyncIterator[ReplyT]):
    """Answers of the streaming call that `start` makes with the first `anext`.

    Raises PeerError or RequestError.
    """

    def __init__(
        self, start: "Callable[[], StreamingCall]", parse: Callable[[bytes], ReplyT]
    ) -> None:
        self._start = start
        self._parse = parse
        self._call: StreamingCall | None = None
        self._answers: AsyncIterator[bytes] | None = None

    async def __anext__(self) -> ReplyT:
        return await unary(self._next, self._parse)

    def _next(self) -> Awaitable[bytes]:
        if self._answers is None:
            self._call = self._start()
            self._answers = aiter(self._call)
        return anext(self._answers)

    async def aclose(self) -> None:
        if self._call is not None:
            self._call.cancel()


async def unary(start: Callable[[], Awaitable[bytes]], parse: Callable[[bytes], ReplyT]) -> ReplyT:
    """The answer of the call that `start` makes.  Raises PeerError or RequestError."""
    try:
        return parse(await start())
    except grpc.aio.AioRpcError as e:
        raise error_of(e) from e
    except grpc.aio.UsageError as e:
        raise PeerError(f"the connection to the peer was closed: {e}") from e
    except (ValueError, RecursionError) as e:
        raise PeerError(f"the peer sent an impossible answer: {e}") from e
    except asyncio.CancelledError as e:
        if cancelled_locally():
            raise
        raise PeerError("the call was cancelled by the other side") from e
