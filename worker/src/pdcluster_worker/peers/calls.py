"""Channels to workers, and calls on them whose every end is one of our errors.

A call ends well, in RequestError (the request's own fault, as raised by the
other worker) or in PeerError.  What is called, and what an end means for the
pair, is `client`'s business.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar, Union

import grpc

from pdcluster_worker.errors import PeerError
from pdcluster_worker.peers.options import CHANNEL_OPTIONS
from pdcluster_worker.peers.status import cancelled_locally, error_of
from pdcluster_worker.proto.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from pdcluster_worker.proto.worker_pb2_grpc import WorkerAsyncStub

ReplyT = TypeVar("ReplyT")
StreamingCall = Union[
    "grpc.aio.UnaryStreamCall[Any, ReplyT]", "grpc.aio.StreamStreamCall[Any, ReplyT]"
]


def open_channel(address: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    """A channel to a worker at host:port; it connects by itself and must be closed."""
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def open_stub(channel: grpc.aio.Channel) -> "WorkerAsyncStub":
    """The calls of worker.proto on that channel."""
    stub: WorkerAsyncStub = WorkerStub(channel)  # the generated class is one at run time
    return stub


async def unary(start: "Callable[[], grpc.aio.UnaryUnaryCall[Any, ReplyT]]") -> ReplyT:
    """The answer of the unary call that `start` makes.  Raises PeerError or RequestError."""
    try:
        return await start()
    except grpc.aio.AioRpcError as e:
        raise error_of(e) from e
    except grpc.aio.UsageError as e:
        raise PeerError(f"the connection to the peer was closed: {e}") from e
    except asyncio.CancelledError as e:
        if cancelled_locally():
            raise
        raise PeerError("the call was cancelled by the other side") from e


class Replies(AsyncIterator[ReplyT]):
    """The answers of the streaming call that `start` makes; closing it cancels the call.

    Raises PeerError or RequestError.

    The call is made with the first answer that is waited for: a channel that was closed meanwhile
    refuses it, and that too is the peer's end.
    """

    def __init__(self, start: "Callable[[], StreamingCall[ReplyT]]") -> None:
        self._start = start
        self._call: StreamingCall[ReplyT] | None = None
        self._answers: AsyncIterator[ReplyT] | None = None

    async def __anext__(self) -> ReplyT:
        try:
            if self._answers is None:
                self._call = self._start()
                self._answers = aiter(self._call)
            return await anext(self._answers)
        except grpc.aio.AioRpcError as e:
            raise error_of(e) from e
        except grpc.aio.UsageError as e:
            raise PeerError(f"the connection to the peer was closed: {e}") from e
        except asyncio.CancelledError as e:
            if cancelled_locally():
                raise
            raise PeerError("the call was cancelled by the other side") from e

    async def aclose(self) -> None:
        """Cancel the call; of one that has ended a no-op."""
        if self._call is not None:
            self._call.cancel()
