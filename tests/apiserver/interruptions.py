"""A proxy before the API server that does what networks and busy servers do: watches fall silent or
expire, writes are refused in bursts.

It speaks plain HTTP to the operator and is administrator to the API server.
"""

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from tests.apiserver.control_plane import ControlPlane

_HOP = frozenset(
    {
        "connection",
        "content-length",
        "content-encoding",
        "transfer-encoding",
        "host",
        "accept-encoding",
    }
)
START_SECONDS = 30.0


class Interruptions:
    """Runs while it is entered; `kubeconfig` leads through it.

    Its methods may be called from any thread.
    """

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self._url, self._tls = control_plane.url, control_plane.tls
        self.kubeconfig = folder / "through-proxy.kubeconfig"
        self.num_watches: Counter[str] = Counter()
        self._streams: dict[str, set[_Stream]] = {}
        self._silent = set[str]()
        self._refusals: list[tuple[int, str]] = []
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def silence(self, plural: str) -> None:
        """From now on watches of this kind stay open without events, those that are opened later
        too.
        """
        self._silent.add(plural)
        for stream in self._streams[plural]:
            stream.is_silent = True

    def let_speak(self, plural: str) -> None:
        """Watches of this kind that are opened from now on work again."""
        self._silent.discard(plural)

    def expire(self, plural: str) -> None:
        """End the open watches of this kind with 410, their resource version is too old; later
        ones work.
        """
        self.let_speak(plural)
        gone = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "Expired",
            "message": "too old",
            "code": 410,
        }
        for stream in list(self._streams[plural]):
            self._loop.call_soon_threadsafe(
                stream.last_words.set_result,
                json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n",
            )

    def refuse_writes(self, code: int, reason: str, times: int) -> None:
        """So many writes that come next are answered so, and do not reach the API server."""
        self._refusals += [(code, reason)] * times

    @property
    def num_refusals(self) -> int:
        """Refusals that no request has met yet."""
        return len(self._refusals)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        async with ClientSession(
            connector=TCPConnector(ssl=self._tls, limit=0), auto_decompress=True
        ) as session:
            self._session = session
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._write_kubeconfig(runner.addresses[0][1])
            self._ready.set()
            await self._end.wait()
            await runner.cleanup()

    def _write_kubeconfig(self, port: int) -> None:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "nameless", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "nameless"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET" and self._refusals:
            code, reason = self._refusals.pop(0)
            return _refusal(code, reason, f"refused: {reason}")
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        upstream = self._session.request(
            request.method,
            self._url + request.path_qs,
            data=await request.read() or None,
            headers=headers,
            timeout=ClientTimeout(),
        )
        async with upstream as answer:
            if request.query.get("watch") == "true" and answer.status == 200:
                return await self._stream(request, answer)
            kept = {
                name: value for name, value in answer.headers.items() if name.lower() not in _HOP
            }
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    async def _stream(self, request: web.Request, answer: Any) -> web.StreamResponse:
        plural = request.path.rsplit("/", 1)[-1]
        stream = _Stream(self._loop.create_future(), is_silent=plural in self._silent)
        self._streams.setdefault(plural, set()).add(stream)
        self.num_watches[plural] += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            await stream.copy(answer, response)
        except (ConnectionError, ClientError):
            pass  # one of the two ended it
        finally:
            self._streams[plural].discard(stream)
        return response


def _refusal(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
    }
    return web.json_response(body, status=code)


class _Stream:
    """One watch.  last_words: lines sent before it ends early."""

    def __init__(self, last_words: asyncio.Future[bytes], *, is_silent: bool) -> None:
        self.is_silent, self.last_words = is_silent, last_words

    async def copy(self, source: Any, target: web.StreamResponse) -> None:
        """Line by line, until one of them ends."""
        while True:
            reading = asyncio.ensure_future(source.content.readuntil(b"\n"))
            try:
                await asyncio.wait({reading, self.last_words}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not reading.done():
                    reading.cancel()
            if self.last_words.done():
                await target.write(self.last_words.result())
                return
            line = reading.result()
            if not line:
                return
            if not self.is_silent:
                await target.write(line)
