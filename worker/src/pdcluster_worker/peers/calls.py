"""The gRPC service between workers, in MessagePack: only workers of one revision call each other.

gRPC passes bytes, which each side decodes: gRPC would hide the reason of a failed decoding.  A
RequestError comes out as it went in; any other end of a call is the peer's and becomes PeerError.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from msgspec.structs import replace

from pdcluster_schema.ports import WORKER_NAME, WORKER_SERVICE, join_address
from pdcluster_schema.text import shortened
from pdcluster_worker.errors import ConfigError, PeerError, RequestError
from pdcluster_worker.messages.peers import CallFailure, decode_failure, encode

if TYPE_CHECKING:
    StreamingCall = grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")
Options = list[tuple[str, Any]]
Context = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGE_BYTES = 64 << 20
"""Holds a prompt of 128k tokens (5 bytes each at most) many times; a prefix cache goes in parts."""

# Pings in both directions find a peer that vanished without closing its connection within about
# the sum; the server permits them that often.
KEEPALIVE_SECONDS = 5.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0

_ERROR_KEY = "pdcluster-error-bin"
# characters: gRPC allows 8 KiB of metadata in all, and may send one as 12 bytes
_MAX_MESSAGE = 1000
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

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


def bind(
    server: grpc.aio.Server, setting: str, host: str, port: int, credentials: grpc.ServerCredentials
) -> int:
    """Listen on `port` (0: any free one); returns the port.

    Raises ConfigError, which names the setting, when the address cannot be used.
    """
    address = join_address(host, port)
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError as e:
        raise ConfigError(
            f"{setting}: {address} cannot be used: taken or not ours; choose another port, or 0 "
            "for any"
        ) from e


class WorkerStub:
    """Methods of the service on a channel, asyncio's or not; messages are bytes.

    handshake:   once per pair and before anything else: Hello, answered by a Hello.
    generate:    to a decode or mixed worker, one for all requests of the pair: SubmitCalls and
                 CancelCalls, answered by CallOutputs and CallEnds.
    prefill:     to a prefill worker: PrefillCall, answered by PrefillReplies.
    push_prefix: to a prefill worker before a prefill: PushPrefix, answered by a TransferTarget,
                 then PrefixPushed.
    credits:     from a decode to a prefill worker while the pair lives: OpenCredits, then
                 ClaimCredit and ReleaseCredit, answered by CreditReplies.
    watch:       WatchCall, answered by Reports.
    ask:         to a decode worker, for its engine's front end: AskCall, answered by the body.
    verify:      from the operator or pdctl to a decode worker, in JSON (docs/contracts.md).
    """

    def __init__(self, channel: Any) -> None:
        self.handshake = channel.unary_unary(f"/{WORKER_SERVICE}/handshake")
        self.generate = channel.stream_stream(f"/{WORKER_SERVICE}/generate")
        self.prefill = channel.unary_stream(f"/{WORKER_SERVICE}/prefill")
        self.push_prefix = channel.stream_stream(f"/{WORKER_SERVICE}/push_prefix")
        self.credits = channel.stream_stream(f"/{WORKER_SERVICE}/credits")
        self.watch = channel.unary_stream(f"/{WORKER_SERVICE}/watch")
        self.ask = channel.unary_unary(f"/{WORKER_SERVICE}/ask")


def method_handlers(service: Any) -> "grpc.GenericRpcHandler[Any, Any]":
    """Handlers of the methods of `WorkerStub` that the service has."""
    kinds = {
        "handshake": grpc.unary_unary_rpc_method_handler,
        "generate": grpc.stream_stream_rpc_method_handler,
        "prefill": grpc.unary_stream_rpc_method_handler,
        "push_prefix": grpc.stream_stream_rpc_method_handler,
        "credits": grpc.stream_stream_rpc_method_handler,
        "watch": grpc.unary_stream_rpc_method_handler,
        "ask": grpc.unary_unary_rpc_method_handler,
        "verify": grpc.unary_stream_rpc_method_handler,
    }
    handlers = {
        name: kind(getattr(service, name)) for name, kind in kinds.items() if hasattr(service, name)
    }
    return grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers)


class Replies(AsyncIterator[ValueT]):
    """Answers of the streaming call that `start` makes with the first `anext`.

    Raises PeerError or RequestError.
    """

    def __init__(
        self, start: "Callable[[], StreamingCall]", parse: Callable[[bytes], ValueT]
    ) -> None:
        self._start = start
        self._parse = parse
        self._call: StreamingCall | None = None
        self._answers: AsyncIterator[bytes] | None = None

    async def __anext__(self) -> ValueT:
        return await unary(self._next, self._parse)

    def _next(self) -> Awaitable[bytes]:
        if self._answers is None:
            self._call = self._start()
            self._answers = aiter(self._call)
        return anext(self._answers)

    async def aclose(self) -> None:
        if self._call is not None:
            self._call.cancel()


async def unary(start: Callable[[], Awaitable[bytes]], parse: Callable[[bytes], ValueT]) -> ValueT:
    """The answer of the call that `start` makes.  Raises PeerError or RequestError."""
    try:
        return parse(await start())
    except grpc.aio.AioRpcError as e:
        raise _error_of_call(e) from e
    except grpc.aio.UsageError as e:
        raise PeerError(f"the connection to the peer was closed: {e}") from e
    except (ValueError, RecursionError) as e:
        raise PeerError(f"the peer sent an impossible answer: {e}") from e
    except asyncio.CancelledError as e:
        if cancelled_locally():
            raise
        raise PeerError("the call was cancelled by the other side") from e


class RefusalError(PeerError):
    """Answered FAILED_PRECONDITION."""


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with the status of whatever the body raises."""
    try:
        yield
    # the call is over: our server stops, or the peer is gone; a status would reach no caller
    except grpc.aio.BaseError as e:
        logger.info("call ended reason=%s", e)
    except Exception as e:
        code, failure = _failure_of(e)
        if failure.status is not None:
            detail = encode(replace(failure, message=""))
            context.set_trailing_metadata(((_ERROR_KEY, detail),))
        await context.abort(code, failure.message)


def failure_of(error: Exception) -> CallFailure:
    """The same for one request among others on a stream."""
    code, failure = _failure_of(error)
    if failure.status is None:
        return replace(failure, message=f"{code.name}: {failure.message}")
    return failure


def _failure_of(error: Exception) -> tuple[grpc.StatusCode, CallFailure]:
    """A bug is logged."""
    if isinstance(error, RequestError):
        fields = (error.status, error.code, error.param, error.retry_after_seconds)
        failure = CallFailure(shortened(error.message, _MAX_MESSAGE), *fields)
        return _CODES.get(error.status, grpc.StatusCode.INTERNAL), failure
    if isinstance(error, PeerError):
        is_refused = isinstance(error, RefusalError)
        code = grpc.StatusCode.FAILED_PRECONDITION if is_refused else grpc.StatusCode.UNAVAILABLE
        return code, CallFailure(str(error) if is_refused else shortened(str(error), _MAX_MESSAGE))
    logger.error("call of a peer failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, CallFailure("internal error: see the log of this worker")


def _error_of_call(error: grpc.aio.AioRpcError) -> PeerError | RequestError:
    message = error.details() or error.code().name
    trailing: Iterable[tuple[str, bytes]] = cast(Any, error.trailing_metadata()) or ()
    for key, value in trailing:
        if key == _ERROR_KEY:
            try:
                return error_of_failure(replace(decode_failure(value), message=message))
            except ValueError as e:
                return PeerError(f"an error that cannot be read: {message}: {e}")
    return PeerError(f"{error.code().name}: {message}")


def error_of_failure(failure: CallFailure) -> PeerError | RequestError:
    if failure.status is None:
        return PeerError(failure.message)
    return RequestError(
        failure.message,
        status=failure.status,
        code=failure.code,
        param=failure.param,
        retry_after_seconds=failure.retry_after_seconds,
    )


def parsed(parse: Callable[[MessageT], ValueT], message: MessageT) -> ValueT:
    """Read a message of a peer.  Raises RequestError 400 for one that no worker of ours sends."""
    try:
        return parse(message)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"a message between workers cannot be read: {e}") from e


async def send_head(context: Context) -> None:
    """Send the head of a call before a second task writes to it.

    grpc.aio would send it with the first answer, and again if the call ends meanwhile: that
    fails, and the caller waits for a status that never comes.
    """
    await context.send_initial_metadata(())


def cancelled_locally() -> bool:
    """True if the CancelledError being handled is this task's own: grpc.aio raises one also when
    the other side cancels a call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
