"""A model hub on loopback that speaks the paths which the client uses, and fails in the ways that a
test asks for.

Gives out the files of a folder as one commit.  Runs in a thread of its own, for
the client is another process.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 8 << 10


@dataclass
class HubServer:
    """The hub.

    token:        what a client must present, None = nothing
    cut_after:    by file: the connection breaks after so many bytes of an answer, as often as
                  `num_cuts` says
    status:       by file, or "" for the listing: answered instead, as often as `num_errors` says
    pause:        seconds between chunks of weights
    lies:         files whose bytes are not those that were announced, once each
    ranges:       whether it can begin in the middle
    """

    folder: Path
    token: str | None = None
    cut_after: dict[str, int] = field(default_factory=dict)
    num_cuts: int = 1
    status: dict[str, int] = field(default_factory=dict)
    num_errors: int = 1
    pause: float = 0.0
    lies: set[str] = field(default_factory=set)
    ranges: bool = True
    extra: dict[str, int] = field(default_factory=dict)
    requested: Counter[str] = field(default_factory=Counter)
    starts: dict[str, list[int]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._listing)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{file}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    # --- answers ----------------------------------------------------------------------------------

    def _refusal(self, request: web.Request, file: str) -> web.Response | None:
        self.requested[file] += 1
        if (
            self.token is not None
            and request.headers.get("authorization") != f"Bearer {self.token}"
        ):
            return web.Response(status=401, headers={"X-Error-Code": "RepoNotFound"})
        if file in self.status and self.requested[file] <= self.num_errors:
            return web.Response(status=self.status[file])
        if request.match_info["name"] == "gated" and file:
            return web.Response(status=403, headers={"X-Error-Code": "GatedRepo"})
        if request.match_info["name"] not in ("tiny", "gated"):
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info["revision"] not in ("main", COMMIT):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return None

    async def _listing(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request, "")) is not None:
            return refusal
        siblings: list[dict[str, Any]] = [
            self._sibling(path) for path in sorted(self.folder.iterdir())
        ]
        siblings += [
            {"rfilename": name, "size": size, "blobId": "b"} for name, size in self.extra.items()
        ]
        return web.json_response({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings})

    def _sibling(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        sibling: dict[str, Any] = {"rfilename": path.name, "size": len(content), "blobId": "b"}
        if path.suffix == ".safetensors":
            sibling["lfs"] = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 134,
            }
        return sibling

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if (refusal := self._refusal(request, name)) is not None:
            return refusal
        content = (self.folder / name).read_bytes()
        if name in self.lies:
            self.lies.discard(name)
            content = bytes(len(content))
        range_header = request.headers.get("range")
        start = (
            int(range_header.removeprefix("bytes=").rstrip("-"))
            if range_header and self.ranges
            else 0
        )
        self.starts.setdefault(name, []).append(start)
        answer = web.StreamResponse(
            status=206 if start else 200, headers={"Content-Length": str(len(content) - start)}
        )
        await answer.prepare(request)
        await self._send(answer, request, name, content[start:])
        return answer

    async def _send(
        self, answer: web.StreamResponse, request: web.Request, name: str, content: bytes
    ) -> None:
        cut = self.cut_after.get(name) if self.requested[name] <= self.num_cuts else None
        for position in range(0, len(content), CHUNK):
            if cut is not None and position >= cut:
                assert request.transport is not None
                request.transport.abort()
                return
            chunk = content[position : position + CHUNK]
            await answer.write(chunk)
            self.sent[name] += len(chunk)
            if self.pause and name.endswith(".safetensors"):
                await asyncio.sleep(self.pause)
