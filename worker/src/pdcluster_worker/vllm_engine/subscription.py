"""Receives vLLM's KV events; vLLM connects to our socket, so a restarted engine finds it."""

import asyncio
from collections.abc import Callable

import zmq

from pdcluster_worker.errors import ConfigError

OnBatch = Callable[[int, bytes], None]


class Subscription:
    """on_batch: called with sequence and payload."""

    def __init__(self, port: int, on_batch: OnBatch) -> None:
        self._port = port
        self._on_batch = on_batch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Raises ConfigError when the port cannot be used."""
        try:
            self._socket.bind(f"tcp://127.0.0.1:{self._port}")
        except zmq.ZMQError as e:
            message = f"engine.vllm.kvEventsPort {self._port} cannot be used: {e}"
            raise ConfigError(message) from e
        self._loop.add_reader(self._socket.fileno(), self._poll)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()

    def _poll(self) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            _, sequence, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            self._on_batch(int.from_bytes(sequence, "big"), payload)
