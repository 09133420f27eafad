"""A real HTTP listener that answers POST /verify as decode workers do: without a proof by a new
challenge.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

PASSED = {
    "outcome": "verified",
    "prefill": "p-0",
    "transport": "tcp",
    "num_tokens": 8,
    "num_bytes": 1000,
    "bytes_per_second": 2000,
    "has_checksum": True,
}


@dataclass
class PlayedWorker:
    """One listener for all workers.  answers: the next ones, the last of which stays.

    requested:  queries, each with the proof that came with it
    challenges: that were given out
    """

    answers: list[tuple[int, Any]]
    port: int = 0
    requested: list[tuple[dict[str, list[str]], str]] = field(default_factory=list)
    challenges: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        target = head.split(" ")[1]
        shown = [line for line in head.splitlines() if line.startswith("Authorization: ")]
        fields = ""
        if shown:
            self.requested.append((parse_qs(urlsplit(target).query), shown[0]))
            status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        else:
            status, answer = 401, {}
            self.challenges.append(f"{len(self.challenges):016x}")
            fields = f"www-authenticate: PDCluster challenge={self.challenges[-1]}\r\n"
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{fields}"
            "connection: close\r\n\r\n".encode()
        )
        writer.write(body)
        await writer.drain()
        writer.close()
