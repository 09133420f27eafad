"""Requests that run at one other worker: all over one stream of `generate`, which costs less than a
call each.  A break fails every request on it, and the next one opens another.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import msgspec
from msgspec.structs import replace

from pdcluster_worker.backoff import run_until_first_ends
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import (
    CallEnd,
    CallOutput,
    CancelCall,
    Generated,
    PrefillMode,
    SubmitCall,
    decode_replies,
    encode,
)
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.batched_writer import BatchedWriter
from pdcluster_worker.peers.calls import Replies, WorkerStub, error_of_failure, open_channel
from pdcluster_worker.peers.checks import checked_token, losses, sanitize_events
from pdcluster_worker.tracing import trace_context

if TYPE_CHECKING:
    FramesCall = grpc.aio.StreamStreamCall[bytes, bytes]

_CLOSED = "the connection to the peer was closed"


class PeerChannel:
    """The channel to one worker.  credentials: what it shows, for as long as it lives."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials) -> None:
        self.credentials = credentials
        self._channel = open_channel(address, credentials)
        self.stub = WorkerStub(self._channel)
        self._stream: _CallStream | None = None
        self._num_requests = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def request(self) -> Iterator[WorkerStub]:
        """The stub for a request, which `idle` waits for."""
        self._count(1)
        try:
            yield self.stub
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_requests += change
        if self._num_requests:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def idle(self) -> None:
        """Wait until the last request has ended, or the connection, which keepalive pings watch."""
        while self._num_requests:
            await self._is_idle.wait()

    def generate_stream(self) -> "_CallStream":
        """The stream of all requests, opened again if it has ended."""
        if self._stream is None or self._stream.has_ended:
            self._stream = _CallStream(self.stub.generate, self._count)
        return self._stream

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close(None)


class _CallStream:
    """start: opens a stream.  count: gets 1 when a request begins, and -1 when it has ended."""

    def __init__(self, start: "Callable[[], FramesCall]", count: Callable[[int], None]) -> None:
        self.out = BatchedWriter(self._write, self._not_sent)
        self._start = start
        self._count = count
        self._call: FramesCall | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, RemoteStream] = {}
        self._task = asyncio.create_task(self._run(), name="generate stream")

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def enter(self, answer: "RemoteStream") -> int:
        """A number for a call, whose answers go there from now on."""
        number = next(self._numbers)
        self._answers[number] = answer
        self._count(1)
        return number

    def leave(self, number: int) -> None:
        if self._answers.pop(number, None) is not None:
            self._count(-1)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail(PeerError(_CLOSED))  # a task that is cancelled before it begins runs no line

    async def _run(self) -> None:
        error: Exception = PeerError(_CLOSED)
        replies = Replies(self._begin, decode_replies)
        try:
            await run_until_first_ends(self._read(replies), self.out.run())
        except Exception as e:
            error = e if isinstance(e, PeerError) else PeerError(f"the stream broke: {e}")
        finally:
            await replies.aclose()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for answer in list(self._answers.values()):
            answer.fail(error)

    def _not_sent(self, item: SubmitCall | CancelCall, error: RequestError) -> None:
        if (answer := self._answers.get(item.call)) is not None:
            answer.fail(error)

    def _begin(self) -> "FramesCall":
        self._call = self._start()
        return self._call

    async def _write(self, frame: bytes) -> None:
        assert self._call is not None, "the first read comes before the first write"
        await self._call.write(frame)

    async def _read(self, replies: Replies[list[CallOutput | CallEnd]]) -> None:
        async for frame in replies:
            for reply in frame:
                self._take(reply)
        raise PeerError("the peer ended the stream")

    def _take(self, reply: CallOutput | CallEnd) -> None:
        answer = self._answers.get(reply.call)
        if answer is None:  # it was cancelled meanwhile
            return
        if not isinstance(reply, CallEnd):
            answer.take(reply.generated)
        elif reply.failure is None:
            answer.fail(PeerError("the answer broke off"))
        else:
            answer.fail(error_of_failure(reply.failure))


class RemoteStream(AsyncIterator[Generated]):
    """Tokens of one request, sent with the first `anext`; closing it cancels the request.

    Raises PeerError, or RequestError as raised there.
    """

    def __init__(
        self,
        channel: PeerChannel,
        worker: tuple[str, str],
        spec: RequestSpec,
        prefill: PrefillMode,
    ) -> None:
        """worker: the pod and its engine."""
        self._channel = channel
        self._pod, self._engine_id = worker
        self._spec = spec
        self._prefill = prefill
        self._stream: _CallStream | None = None
        self._number = 0
        self._began_seconds = 0.0
        self._items: deque[Generated | Exception] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._is_over = False

    async def __anext__(self) -> Generated:
        if self._stream is None and not self._is_over:
            self._submit()
        while not self._items:
            if self._is_over:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            except asyncio.CancelledError:
                self._cancel()
                raise
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self._cancel()

    def take(self, generated: Generated) -> None:
        try:
            checked_token(self._spec.request_id, generated.token)
        except ValueError as e:
            self._cancel()
            self._put(PeerError(f"the peer sent an impossible answer: {e}"))
            return
        if generated.degraded or generated.notes:
            notes = sanitize_events(generated.notes, self._began_seconds, self._pod)
            generated = replace(generated, degraded=losses(generated.degraded), notes=notes)
        self._put(generated)
        if generated.token.finish_reason is not None:
            self._end()

    def fail(self, error: Exception) -> None:
        self._put(error)
        self._end()

    def _submit(self) -> None:
        self._stream = self._channel.generate_stream()
        self._number = self._stream.enter(self)
        self._began_seconds = time.monotonic()
        spec, context = msgspec.Raw(encode(self._spec)), trace_context.current()
        self._stream.out.put(
            SubmitCall(self._number, self._engine_id, self._prefill, spec, context)
        )

    def _put(self, item: Generated | Exception) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _end(self) -> None:
        self._is_over = True
        if self._stream is not None:
            self._stream.leave(self._number)

    def _cancel(self) -> None:
        if self._stream is not None and not self._is_over:
            self._stream.out.put(CancelCall(self._number))
        self._items.clear()
        self._end()
