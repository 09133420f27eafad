"""Client of the engine process: sends inputs, routes outputs to requests."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

from pdcluster_worker.backoff import run_until_first_ends
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.adapters import AdapterReply, ResidentAdapters
from pdcluster_worker.messages.engine import (
    BlockEvents,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineReady,
    EngineStats,
    Pong,
    Tokens,
)
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.serving.engines.adapter_calls import AdapterCalls
from pdcluster_worker.stock_engine.front_end import CountEmbeddings
from pdcluster_worker.streams import Reader
from pdcluster_worker.system.native_dtype import DType
from pdcluster_worker.tracing import trace_context

logger = logging.getLogger(__name__)


class FrameSocket(Protocol):
    """The part of an asyncio ZMQ PAIR socket that is used here."""

    def recv(self) -> Awaitable[bytes]: ...

    def send(self, data: bytes) -> Awaitable[object]: ...


ENGINE_STALLED = "engine_stalled"
"""Code of the error of a request whose engine has stalled; it goes to peers too."""

OUT_OF_BLOCKS = "out_of_blocks"
"""Code of the error of a request that its engine preempted again and again; it goes to peers."""

MODEL_NOT_FOUND = "model_not_found"
"""Code of the error of a request whose adapter its engine no longer has; it goes to peers."""

RequestOutput = (
    Token
    | messages.ReceiveReady
    | messages.ReceiveRefused
    | messages.PrefillDone
    | messages.Received
    | messages.PrefillFailed
    | messages.FetchFailed
)


class EngineDiedError(RequestError):
    """The engine process is gone; its requests fail with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the engine of this worker stopped: {reason}", status=503, code="engine_dead"
        )


class EngineStalledError(RequestError):
    """The engine process has stalled; its requests fail, and may be tried elsewhere."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=503, code=ENGINE_STALLED, retry_after_seconds=1)


class ShortOfBlocksError(RequestError):
    """The engine preempted a request so often that another worker should run it."""

    def __init__(self, num_preemptions: int) -> None:
        message = f"the request was preempted {num_preemptions} times, and another worker has room"
        super().__init__(message, status=503, code=OUT_OF_BLOCKS, retry_after_seconds=1)


class AdapterGoneError(RequestError):
    """An adapter was unloaded while its request was on the way; another worker may have it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=404, code=MODEL_NOT_FOUND, param="model")


class RequestOutputs:
    """Outputs of the engine for one request, in order, for one reader at a time."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self.num_preemptions = 0
        # Asked at each preemption for the error, if any, that is to end the request.
        self.on_preempted: Callable[[], RequestError | None] = lambda: None
        self.ended = False  # the engine holds nothing of this request any more
        # Headers of the trace that the task which opened it is in.
        self.trace = trace_context.current()
        self._items: deque[RequestOutput | Exception] = deque()
        self._arrival: asyncio.Future[None] | None = None  # what waits for the next one
        self._reader: Reader[Token] | None = None  # takes tokens meanwhile

    def put(self, item: RequestOutput | messages.Preempted | RequestError) -> None:
        """Deliver; `ended` follows from what the item says."""
        if isinstance(item, Token):
            self.num_tokens += 1
            self.ended = item.finish_reason is not None
            if self._hand_over(item):
                return
        elif isinstance(item, messages.Preempted):
            self._preempted()
            return
        elif isinstance(item, RequestError | messages.PrefillDone | messages.PrefillFailed):
            # An engine that has stalled, or is short of blocks, holds the request, and would
            # continue it.
            self.ended = not isinstance(item, EngineStalledError | ShortOfBlocksError)
        self._append(item)

    def _append(self, item: RequestOutput | Exception) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _hand_over(self, token: Token) -> bool:
        """Give a token to the reader; False where it must be waited for as any other output."""
        reader = self._reader
        if reader is None or self.ended or self._items:
            return False
        try:
            if not reader.is_open:
                return False
            reader.take(token)
        except Exception as e:  # this request's own, and no other's
            self._append(e)
        return True

    def _preempted(self) -> None:
        self.num_preemptions += 1
        if (error := self.on_preempted()) is not None:
            self.put(error)

    async def get(self, reader: Reader[Token] | None = None) -> RequestOutput:
        """Wait for the next output.  reader: takes tokens meanwhile, while open.

        Raises RequestError, EngineDiedError or EngineStalledError, and what the reader raised.
        """
        self._reader = reader
        try:
            while not self._items:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
        finally:
            self._reader = None
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    async def token(self, reader: Reader[Token] | None = None) -> Token:
        """Wait for the next output, which must be a token.  reader: see `get`."""
        item = await self.get(reader)
        if not isinstance(item, Token):
            raise RequestError(
                f"the engine answered {type(item).__name__} where a token was due", status=500
            )
        return item


class EngineClient:
    """One engine, seen from the server process.

    socket:        to its process; None = its owner moves the messages, by `inputs` and `deliver`.
    died, stalled: why it does not serve; None while it does.
    """

    def __init__(self, socket: FrameSocket | None = None) -> None:
        self.died: str | None = None
        self.stalled: str | None = None
        self.has_ended = False  # its process is gone, and its last words may still be on the way
        self.is_given_up = False  # it is to be restarted by another
        self.on_pong: Callable[[Pong], None] = lambda _: None
        # Called with what is waited for, where that is known before it serves.
        self.on_wait: Callable[[str], None] = lambda _: None
        # Of a stock engine that serves.
        self.count_embeddings: CountEmbeddings = lambda _: nullcontext(lambda _: None)
        self.stats: EngineStats | None = None
        self.on_stats: list[Callable[[EngineStats], None]] = []
        self.on_blocks: list[Callable[[BlockEvents], None]] = []
        self._socket = socket
        self._requests: dict[str, RequestOutputs] = {}
        self._num_sent = 0
        self._unknown: set[str] = set()  # open requests that `stats` cannot know of
        # (place among what was sent, request) of those that were sent since
        self._begun: deque[tuple[int, str]] = deque()
        self.adapters = AdapterCalls(self.send)
        self._outgoing: asyncio.Queue[EngineInput] = asyncio.Queue()
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()

    async def ready(self) -> EngineReady:
        """Wait until the engine serves.  Raises EngineDiedError if it ends before."""
        return await asyncio.shield(self._ready)

    def send(self, message: EngineInput) -> None:
        """Queue one message; order is kept.  Raises EngineDiedError."""
        if self.died is not None:
            raise EngineDiedError(self.died)
        self._num_sent += 1
        if isinstance(message, messages.Submit | messages.Receive | messages.Prefill):
            self._begun.append((self._num_sent, message.spec.request_id))
        self._outgoing.put_nowait(message)

    def begin(self, dtype: DType) -> None:
        self._outgoing.put_nowait(messages.Begin(dtype))

    @property
    def is_loading(self) -> bool:
        """True until the engine reports that it serves or has failed."""
        return not self._ready.done()

    def ping(self) -> None:
        """Ask the engine's loop for a Pong; no message that statistics know of."""
        self._outgoing.put_nowait(messages.Ping())

    @property
    def problem(self) -> str | None:
        """Reason why no new request may go to it; None while it serves."""
        return self.died or ("its process has ended" if self.has_ended else self.stalled)

    @property
    def is_lost(self) -> bool:
        """True if the engine process is gone and does not only stall."""
        return self.has_ended or self.died is not None

    @property
    def is_reported(self) -> bool:
        return self.stats is not None and self.stats.num_inputs >= self._num_sent

    @property
    def num_unknown(self) -> int:
        return len(self._unknown)

    def trace(self, request_id: str) -> Mapping[str, str]:
        """Headers of the trace of an open request; empty without one."""
        outputs = self._requests.get(request_id)
        return {} if outputs is None else outputs.trace

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, request_id: str) -> RequestOutputs:
        """Start to listen for one request.  Raises RequestError if its id is in use."""
        self.check()
        if self.knows(request_id):
            raise RequestError(
                f"request id {request_id} is already being served",
                status=409,
                code="duplicate_request",
            )
        outputs = self._requests[request_id] = RequestOutputs(request_id)
        self._unknown.add(request_id)
        return outputs

    def check(self) -> None:
        """Raise EngineDiedError when the engine is gone, EngineStalledError while it stalls."""
        if self.died is not None:
            raise EngineDiedError(self.died)
        if self.stalled is not None:
            raise EngineStalledError(self.stalled)

    def close(self, outputs: RequestOutputs) -> None:
        """Stop listening, and abort the request unless the engine has already ended it."""
        self._requests.pop(outputs.request_id, None)
        self._unknown.discard(outputs.request_id)
        if not outputs.ended and self.died is None:
            self.send(messages.Abort(outputs.request_id))

    def fail(self, reason: str) -> None:
        """The engine is gone: open requests fail now, later ones at once."""
        if self.died is not None:
            return
        self.died = reason
        if not self._ready.done():
            self._ready.set_exception(EngineDiedError(reason))
            self._ready.exception()  # it may be that nothing waits for it any more
        for outputs in self._requests.values():
            outputs.put(EngineDiedError(reason))
        self.adapters.fail(EngineDiedError(reason))

    def give_up(self, reason: str) -> None:
        """It is to be killed, for no fault of its requests: they may be tried elsewhere."""
        if self.died is None:
            self.stall(reason)
            self.fail(reason)

    def stall(self, reason: str) -> None:
        """The engine has stalled: requests fail until `recover`."""
        self.stalled = reason
        for outputs in self._requests.values():
            outputs.put(EngineStalledError(reason))

    def recover(self) -> None:
        self.stalled = None

    async def run(self) -> None:
        assert self._socket is not None, "the owner of the client moves its messages"
        await run_until_first_ends(self._send_all(self._socket), self._receive_all(self._socket))

    async def inputs(self) -> list[EngineInput]:
        """Wait for messages to the engine, and take all of them."""
        batch = [await self._outgoing.get()]
        while not self._outgoing.empty():
            batch.append(self._outgoing.get_nowait())
        return batch

    async def _send_all(self, socket: FrameSocket) -> None:
        while True:
            await socket.send(messages.encode(await self.inputs()))

    async def _receive_all(self, socket: FrameSocket) -> None:
        while True:
            self.deliver(messages.decode_outputs(await socket.recv()))

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Hand on what the engine said."""
        for output in outputs:
            # the numbers and blocks of one that was killed are given up already
            if self.died is None:
                self._take(output)

    def _take(self, output: EngineOutput) -> None:
        match output:
            case Tokens(tokens=tokens):
                for token in tokens:
                    self._put(token.request_id, token)
            case EngineStats():
                self._take_stats(output)
                for callback in self.on_stats:
                    callback(output)
            case BlockEvents():
                for hear_blocks in self.on_blocks:
                    hear_blocks(output)
            case Pong():
                self.on_pong(output)
            case EngineReady():
                self._ready.set_result(output)
            case EngineFailed(message=message):
                self.fail(message)
            case AdapterReply() | ResidentAdapters():
                self.adapters.take(output)
            case messages.RequestFailed():
                self._put(output.request_id, _request_error(output))
            case _:
                self._put(output.request_id, output)

    def _take_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        while self._begun and self._begun[0][0] <= stats.num_inputs:
            self._unknown.discard(self._begun.popleft()[1])

    def _put(
        self, request_id: str, item: RequestOutput | messages.Preempted | RequestError
    ) -> None:
        # An output for a closed outputs crossed its Abort on the way and has no reader.
        if (outputs := self._requests.get(request_id)) is not None:
            outputs.put(item)


def _request_error(failed: messages.RequestFailed) -> RequestError:
    if failed.lacks_adapter:
        return AdapterGoneError(failed.message)
    if failed.is_refusal:
        return RequestError(failed.message, param=failed.param)
    return RequestError(failed.message, status=500, code="engine_error")
