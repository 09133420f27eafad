"""A small HTTP server that answers as a test says, whatever it is asked; keeps the bodies that it
got.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = {"choices": [{"index": 0, "text": "a"}], "usage": None}


def usage(num_tokens: int, num_prompt_tokens: int = 8) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {"completion_tokens": num_tokens, "prompt_tokens": num_prompt_tokens},
    }


def events(*bodies: object) -> bytes:
    return b"".join(
        b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        for body in bodies
    )


def answer_of(body: dict[str, Any]) -> bytes:
    """As many tokens as the request asks for."""
    count = body["max_tokens"]
    token = {"choices": [{"index": 0, "delta": {"content": "a"}}]} if "messages" in body else TOKEN
    return events(*[token] * count, usage(count), b"[DONE]")


@dataclass
class SmallServer:
    base_url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)


@asynccontextmanager
async def serving(
    answer: Callable[[dict[str, Any]], bytes] = answer_of,
    *,
    status: int = 200,
    piece_bytes: int = 1000,
) -> AsyncIterator[SmallServer]:
    """On a free loopback port; bytes leave in pieces, wherever that cuts them."""
    server = SmallServer("")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def respond(request: web.Request) -> web.StreamResponse:
        server.bodies.append(await request.json())
        server.headers.append(request.headers)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        body = answer(server.bodies[-1])
        for start in range(0, len(body), piece_bytes):
            await response.write(body[start : start + piece_bytes])
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{path:.*}", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def serving_aside(answer: Callable[[dict[str, Any]], bytes] = answer_of) -> Iterator[SmallServer]:
    """The same in a thread of its own, for callers that run an event loop themselves."""
    found: list[SmallServer] = []
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(answer) as server:
            found.append(server)
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(10)
        yield found[0]
    finally:
        is_over.set()
        thread.join()
