"""Requests that run at one other worker: all of them over one stream of `Generate`.

A call of its own for each request would cost more than all else that is done for it.  The stream
opens with the first request; its break fails every request on it, and the next one opens another.
What a peer sends is checked here, item by item.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.generate import CallEnd, CancelCall, SubmitCall, decode_reply, encode
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.batched_writer import BatchedWriter
from pdcluster_worker.peers.calls import Replies
from pdcluster_worker.peers.checks import checked_token, losses
from pdcluster_worker.peers.peer_events import sanitize_events
from pdcluster_worker.peers.status import error_of_failure
from pdcluster_worker.peers.tasks import run_until_first_ends
from pdcluster_worker.proto import worker_pb2 as pb
from pdcluster_worker.tracing import trace_context

if TYPE_CHECKING:
    import grpc

    FramesCall = grpc.aio.StreamStreamCall[pb.Frame, pb.Frame]

_CLOSED = "the connection to the peer was closed"


class GenerateClient:
    """The stream to one worker.

    start: opens one.  count: called with 1 when a request begins, and with -1 when it has ended.
    """

    def __init__(self, start: "Callable[[], FramesCall]", count: Callable[[int], None]) -> None:
        self._start = start
        self._count = count
        self._stream: _CallStream | None = None

    def open(self) -> "_CallStream":
        """The stream; a new one after a break."""
        if self._stream is None or self._stream.has_ended:
            self._stream = _CallStream(self._start, self._count)
        return self._stream

    async def close(self) -> None:
        """End every request."""
        if self._stream is not None:
            await self._stream.close()


class _CallStream:
    """One stream, from its first request to its break."""

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
        """True after a break."""
        return self._task.done()

    def enter(self, answer: "RemoteStream") -> int:
        """A number for a call, whose answers go there from now on."""
        number = next(self._numbers)
        self._answers[number] = answer
        self._count(1)
        return number

    def leave(self, number: int) -> None:
        """Take no more answers of a call."""
        if self._answers.pop(number, None) is not None:
            self._count(-1)

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail(PeerError(_CLOSED))  # a task that is cancelled before it begins runs no line

    async def _run(self) -> None:
        error: Exception = PeerError(_CLOSED)
        replies = Replies(self._begin)
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

    async def _write(self, frame: pb.Frame) -> None:
        assert self._call is not None, "the first read comes before the first write"
        await self._call.write(frame)

    async def _read(self, replies: Replies[pb.Frame]) -> None:
        async for frame in replies:
            for item in frame.items:
                self._take(item)
        raise PeerError("the peer ended the stream")

    def _take(self, item: bytes) -> None:
        try:
            reply = decode_reply(item)
        except msgspec.DecodeError as e:
            raise PeerError(f"the peer sent an impossible answer: {e}") from e
        answer = self._answers.get(reply.call)
        if answer is None:  # it was called off meanwhile
            return
        if not isinstance(reply, CallEnd):
            answer.take(reply.generated)
        elif reply.failure is None:
            answer.fail(PeerError("the answer broke off"))
        else:
            answer.fail(error_of_failure(reply.failure))


class RemoteStream(AsyncIterator[Generated]):
    """The tokens of one request; closing it calls the request off.

    The request is sent when its first token is waited for.  Raises PeerError, or RequestError as
    raised there.
    """

    def __init__(
        self,
        client: GenerateClient,
        worker: tuple[str, str],
        spec: RequestSpec,
        prefill: PrefillMode,
    ) -> None:
        """worker: the pod and the engine that are asked."""
        self._client = client
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
        """Call it off; of one that has ended a no-op."""
        self._cancel()

    def take(self, generated: Generated) -> None:
        """The next token, as the peer sent it."""
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
        """It has ended by an error."""
        self._put(error)
        self._end()

    def _submit(self) -> None:
        self._stream = self._client.open()
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
