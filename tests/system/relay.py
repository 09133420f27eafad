"""A worker behind relays: what others send it passes through a test, which may damage it.

The worker announces 127.0.0.2 and listens on 127.0.0.1; each relay listens on the one and connects
to the other, at one port.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.system.worker_process import WorkerProcess

ANNOUNCED = "127.0.0.2"
_LISTENS = "127.0.0.1"

SKIPPED_BYTES = 20_000
"""Bytes that are left as they are, of a connection to a KV port: hello and first header."""


class Relays:
    """Those of one worker.  damage_next: flip a bit of the next KV that is written to it."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.damage_next = False
        self._listeners = [
            self._listen(kind, port)
            for kind, port in worker.settings["listen"].items()
            if kind != "host"
        ]

    def close(self) -> None:
        """Take no more connections."""
        for listener in self._listeners:
            listener.close()

    def _listen(self, kind: str, port: int) -> socket.socket:
        listener = socket.create_server((ANNOUNCED, port))
        threading.Thread(target=self._serve, args=(listener, kind), daemon=True).start()
        return listener

    def _serve(self, listener: socket.socket, kind: str) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection((_LISTENS, listener.getsockname()[1]))
            except OSError:
                return
            for source, sink, is_kv in ((near, far, kind == "kv"), (far, near, False)):
                pump = threading.Thread(target=self._pump, args=(source, sink, is_kv), daemon=True)
                pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_kv: bool) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                num_bytes += len(data)
                if is_kv and self.damage_next and num_bytes > SKIPPED_BYTES:
                    self.damage_next = False
                    data[-1] ^= 1
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def relayed(worker: WorkerProcess) -> Iterator[Relays]:
    relays = Relays(worker)
    worker.environment["POD_IP"] = ANNOUNCED
    try:
        worker.start()
        yield relays
    finally:
        relays.close()
