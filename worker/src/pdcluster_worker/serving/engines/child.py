"""The engine process as a child of the server process, and the socket to it."""

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import zmq

from pdcluster_worker.messages.engine import Stop
from pdcluster_worker.serving.engines.client import EngineClient, EngineDiedError
from pdcluster_worker.serving.engines.group import Child


class PairSocket:
    """Implements `client.FrameSocket`; one task receives and one sends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    def bind(self) -> None:
        self._socket.bind(self._address)
        self._loop.add_reader(self._socket.fileno(), self._poll)

    async def recv(self) -> bytes:
        while not self._frames:
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._frames.popleft()

    async def send(self, data: bytes) -> None:
        """Queue one frame; waits only for the engine to connect."""
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
                break
            except zmq.Again:
                self._writable = self._loop.create_future()
                self._poll()
                await self._writable
        # A call may swallow the signal that something has come: the socket's descriptor says it
        # once.
        self._poll()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)

    def _poll(self) -> None:
        while (events := int(self._socket.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
            self._frames.append(self._socket.recv(zmq.NOBLOCK))
        if self._frames:
            _wake(self._arrival)
        if events & zmq.POLLOUT:
            _wake(self._writable)


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Time for an engine to stop before it is killed; it only has to close sockets."""

LAST_WORDS_SECONDS = 0.5
"""Time to wait, after the process has died, for its EngineFailed message, which has the reason."""


class EngineChild(Child):
    """An engine process that is a child of this one.  environment: over this one's."""

    def __init__(
        self,
        config_path: Path,
        environment: Mapping[str, str],
        rank: int = 0,
        board: int | None = None,
    ) -> None:
        # 0700: the socket is ours alone
        self._folder = tempfile.TemporaryDirectory(prefix="pdcluster-")
        self._context = zmq.Context(io_threads=1)
        self._address = f"ipc://{self._folder.name}/engine"
        self._socket = PairSocket(self._context, self._address)
        super().__init__(rank, EngineClient(self._socket))
        self._board = board
        self._config_path = config_path
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process, which waits for `client.begin` before it loads."""
        self._socket.bind()
        arguments = ["--engine-config", str(self._config_path), "--engine", self._address]
        arguments += ["--rank", str(self.rank)]
        if self._board is not None:
            arguments += ["--board", str(self._board)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "pdcluster_worker", *arguments),
            env=self._environment,
            pass_fds=() if self._board is None else (self._board,),
        )
        self._tasks = [
            asyncio.create_task(part)
            for part in (self._talk(), self._watch(), self._unlink_when_connected())
        ]

    def _kill(self) -> None:
        """Stopped ones too."""
        assert self._process is not None, "only a started process can be killed"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """End the process: ask unless it loads, then kill."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(Exception):
                if self.client.is_loading:
                    self._process.kill()
                else:
                    self.client.send(Stop())
            try:
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            except TimeoutError:
                logger.warning("engine did not stop in %.0f s: killed", END_SECONDS)
                self._process.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), END_SECONDS)
        await super().stop()
        self._socket.close()
        self._context.term()
        self._folder.cleanup()

    async def _talk(self) -> None:
        try:
            await self.client.run()
        except Exception as e:
            logger.exception("messages to the engine failed")
            self.client.fail(f"messages failed: {e}")

    async def _unlink_when_connected(self) -> None:
        """A connected socket needs no name, and SIGKILL would leave its folder."""
        with contextlib.suppress(EngineDiedError):
            await self.client.ready()
        self._folder.cleanup()

    async def _watch(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        self.client.has_ended = True
        await asyncio.sleep(0 if self.client.died else LAST_WORDS_SECONDS)
        self.client.fail(f"its process ended with status {status}")
        self.exit_status.set_result(status)
