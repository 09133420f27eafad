"""The engine's end of its connection: to the server process beside it, or to a head."""

import asyncio
import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from pdcluster_schema.ports import WORKER_NAME
from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.engine.ports import EngineBrokenError
from pdcluster_worker.headless import (
    HELLO_BYTES,
    HELLO_SECONDS,
    SILENCE_SECONDS,
    HeadConnectionError,
    HeadHello,
    HeadReply,
    client_context,
    decode_answer,
    encode,
    read_frame,
    write_frame,
)
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineInput, EngineOutput

CONNECT_SECONDS = 60.0  # for a head that may be starting itself

CLOSE_SECONDS = 2.0
UNSENT_BYTES = 64 << 20  # unsent bytes above which the head counts as gone

_RETRY_SECONDS = 1.0


class EngineMailbox:
    """The engine's end of its connection to a server process."""

    def __init__(self) -> None:
        self._failure: str | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup, zmq.POLLIN)

    def wake(self) -> None:
        """End the current or next wait; thread-safe."""
        os.eventfd_write(self._wakeup, 1)

    def fail(self, reason: str) -> None:
        """Make the current or next `receive` raise EngineBrokenError; thread-safe."""
        self._failure = reason
        self.wake()

    def receive(self, timeout_seconds: float | None) -> list[EngineInput]:
        """All messages that have arrived; waits for the first (None: without limit).

        Raises EngineBrokenError after `fail`, and HeadConnectionError when a head is gone.
        """
        timeout = None if timeout_seconds is None else math.ceil(timeout_seconds * 1000)
        if self._wakeup in dict(self._poller.poll(timeout)):
            os.eventfd_read(self._wakeup)
        if self._failure is not None:
            raise EngineBrokenError(self._failure)
        return [message for frame in self._frames() for message in messages.decode_inputs(frame)]

    def _frames(self) -> Iterator[bytes]:
        raise NotImplementedError

    def send(self, outputs: Sequence[EngineOutput]) -> None:
        """Never blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Deliver what is queued, then close."""
        raise NotImplementedError


class EngineSocket(EngineMailbox):
    """A ZMQ pair."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        # neither side may block or drop: requests are bounded at the ingress
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._poller.register(self._socket, zmq.POLLIN)

    def _frames(self) -> Iterator[bytes]:
        while self._socket.poll(0):
            yield self._socket.recv()

    def send(self, outputs: Sequence[EngineOutput]) -> None:
        self._socket.send(messages.encode(outputs))

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


class HeadClient(EngineMailbox):
    """TLS to a head, kept by a thread.  Raises HeadConnectionError when the head refuses."""

    def __init__(
        self,
        head: tuple[str, int],
        tls: TLSConfig,
        hello: HeadHello,
        join_seconds: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__()
        self._head, self._tls, self._join_seconds = head, tls, join_seconds
        self._arrived: deque[bytes] = deque()
        self._lost: str | None = None
        self._loop = asyncio.new_event_loop()
        self._writer: asyncio.StreamWriter | None = None
        try:
            self.answer: HeadReply = self._loop.run_until_complete(self._connect(hello))
        except HeadConnectionError:
            self._free()
            raise
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._read_all(),), name="head", daemon=True
        )
        self._thread.start()

    def _frames(self) -> Iterator[bytes]:
        while self._arrived:
            yield self._arrived.popleft()
        if self._lost is not None:
            raise HeadConnectionError(
                f"the head {self._head[0]}:{self._head[1]} is gone: {self._lost}"
            )

    def send(self, outputs: Sequence[EngineOutput]) -> None:
        """Never blocks; lost with the connection."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._write, messages.encode(outputs))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._free()

    def _free(self) -> None:
        self._loop.close()
        os.close(self._wakeup)

    async def _connect(self, hello: HeadHello) -> HeadReply:
        host, port = self._head
        end, problem = self._loop.time() + self._join_seconds, "it does not answer"
        while self._loop.time() < end:
            try:
                answer = await asyncio.wait_for(self._greet(host, port, hello), HELLO_SECONDS)
            except (OSError, TimeoutError, HeadConnectionError, msgspec.DecodeError) as e:
                problem = str(e) or type(e).__name__
                await self._hang_up()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if answer.refused:
                await self._hang_up()
                raise HeadConnectionError(
                    f"the head {host}:{port} refuses this engine: {answer.refused}"
                )
            return answer
        raise HeadConnectionError(
            f"the head {host}:{port} cannot be reached for {self._join_seconds:.0f} s: {problem}"
        )

    async def _greet(self, host: str, port: int, hello: HeadHello) -> HeadReply:
        context = client_context(self._tls)
        self._reader, self._writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=WORKER_NAME
        )
        write_frame(self._writer, encode(hello))
        return decode_answer(await read_frame(self._reader, HELLO_BYTES))

    async def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _read_all(self) -> None:
        try:
            while True:
                self._arrived.append(
                    await asyncio.wait_for(read_frame(self._reader), SILENCE_SECONDS)
                )
                self.wake()
        except TimeoutError:
            self._lose(f"it has sent nothing for {SILENCE_SECONDS:.0f} s")
        except HeadConnectionError as e:
            self._lose(str(e))
        await self._hang_up()

    def _write(self, data: bytes) -> None:
        if self._writer is None or self._lost is not None:
            return
        write_frame(self._writer, data)
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            self._lose("it reads nothing any more")

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.wake()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()  # what is written still goes out; then the reader ends
