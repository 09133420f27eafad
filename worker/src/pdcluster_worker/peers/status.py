"""Errors across gRPC: a RequestError, whose fields are metadata of the call's end, comes out as it
went in; any other end is the peer's and becomes PeerError.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import grpc
import msgspec

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import CallFailure

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")

_ERROR_KEY = "pdcluster-error-bin"
# characters: gRPC allows 8 KiB of metadata in all, and may send one as 12 bytes
_MAX_MESSAGE = 1000
_INTERNAL = "internal error: see the log of this worker"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[Any, Any]


class _Detail(msgspec.Struct, frozen=True):
    status: int
    code: str | None
    param: str | None
    retry_after_seconds: int | None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Detail).decode


class RefusalError(PeerError):
    """Answered FAILED_PRECONDITION."""


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with the status of whatever the body raises."""
    try:
        yield
    except RequestError as e:
        detail = _Detail(e.status, e.code, e.param, e.retry_after_seconds)
        context.set_trailing_metadata(((_ERROR_KEY, _encode(detail)),))
        await context.abort(
            _CODES.get(e.status, grpc.StatusCode.INTERNAL), shortened(e.message, _MAX_MESSAGE)
        )
    except RefusalError as e:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))
    except PeerError as e:
        await context.abort(grpc.StatusCode.UNAVAILABLE, shortened(str(e), _MAX_MESSAGE))
    # the call is over: our server stops, or the peer is gone; a status would reach no caller
    except grpc.aio.BaseError as e:
        logger.info("call ended reason=%s", e)
    except Exception:
        logger.exception("call failed")
        await context.abort(grpc.StatusCode.INTERNAL, _INTERNAL)


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


def error_of(error: grpc.aio.AioRpcError) -> PeerError | RequestError:
    message = error.details() or error.code().name
    trailing: Iterable[tuple[str, bytes | str]] = cast(Any, error.trailing_metadata()) or ()
    for key, value in trailing:
        if key == _ERROR_KEY:
            return _request_error(message, value)
    return PeerError(f"{error.code().name}: {message}")


def failure_of(error: Exception) -> CallFailure:
    """The same for one request among others on a stream; a bug is logged."""
    if isinstance(error, RequestError):
        fields = (error.status, error.code, error.param, error.retry_after_seconds)
        return CallFailure(shortened(error.message, _MAX_MESSAGE), *fields)
    if isinstance(error, RefusalError):
        return CallFailure(f"FAILED_PRECONDITION: {error}")
    if isinstance(error, PeerError):
        return CallFailure(f"UNAVAILABLE: {shortened(str(error), _MAX_MESSAGE)}")
    logger.error("request of a peer failed", exc_info=error)
    return CallFailure(f"INTERNAL: {_INTERNAL}")


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


def cancelled_locally() -> bool:
    """True if the CancelledError being handled is this task's own: grpc.aio raises one also when
    the other side cancels a call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _request_error(message: str, value: bytes | str) -> PeerError | RequestError:
    try:
        detail = _decode(value)
    except msgspec.DecodeError as e:
        return PeerError(f"an error that cannot be read: {message}: {e}")
    return RequestError(
        message,
        status=detail.status,
        code=detail.code,
        param=detail.param,
        retry_after_seconds=detail.retry_after_seconds,
    )
