"""Pure ASGI answer of a generation.  Nothing is sent before the first token, so an error before it
has its own HTTP status; a client that goes away cancels the generation at once.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.formatter import MEDIA_TYPE, Formatter
from pdcluster_worker.server.generation.generation import Generation
from pdcluster_worker.server.http.raw_http import DIRECT_WRITER
from pdcluster_worker.server.text.events import Delta
from pdcluster_worker.streams import Mapped, Reader

logger = logging.getLogger(__name__)

PREFILL_HEADER = "x-pdcluster-prefill"
DEGRADED_HEADER = "x-pdcluster-degraded"


class GenerationResponse(Response):
    def __init__(
        self, generation: Generation, formatter: Formatter, request_id: str, *, stream: bool
    ) -> None:
        super().__init__()
        self._generation = generation
        self._formatter = formatter
        self._streams = stream
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct_writer: Reader[bytes] | None = scope.get("state", {}).get(DIRECT_WRITER)
        answer = (
            self._stream(send, direct_writer)
            if self._streams
            else self._whole(scope, receive, send)
        )
        if not await _unless_disconnected(receive, answer):
            logger.info("client gone request=%s", self._request_id)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: list[list[Delta]] = [[] for _ in range(self._generation.num_choices)]
        async with aclosing(self._generation.deltas()) as deltas:
            first = await anext(deltas)  # what this raises is a request that was refused
            choices[first.index].append(first)
            try:
                async for delta in deltas:
                    choices[delta.index].append(delta)
            except RequestError as e:
                await self._formatter.refused(e)(scope, receive, send)
                return
        body = self._formatter.whole(choices, self._generation.usage())
        await Response(body, headers=self._answer_headers("application/json"))(scope, receive, send)

    async def _stream(self, send: Send, direct_writer: Reader[bytes] | None) -> None:
        formatter = self._formatter
        async with aclosing(self._generation.deltas()) as deltas:
            first = await anext(deltas)
            headers = Response(
                headers={**self._answer_headers(MEDIA_TYPE), "cache-control": "no-cache"}
            ).raw_headers
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [h for h in headers if h[0] != b"content-length"],
                }
            )
            try:
                await _send(send, formatter.begin(self._generation.usage()))
                await _send(send, formatter.of(first))
                if direct_writer is not None:
                    # an empty part would be the body's end
                    events: Mapped[Delta, bytes]
                    events = Mapped(lambda delta: formatter.of(delta) or None, direct_writer)
                    self._generation.follow(events)
                async for delta in deltas:
                    await _send(send, formatter.of(delta))
                end = formatter.end(self._generation.usage())
            except Exception as e:
                end = formatter.failed(self._shown(e))
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _shown(self, error: Exception) -> RequestError:
        if isinstance(error, RequestError):
            logger.warning(
                "failed after the first token request=%s error=%s", self._request_id, error
            )
            return error
        logger.error("unhandled error request=%s", self._request_id, exc_info=error)
        return RequestError(
            f"internal error: see the worker's log for request {self._request_id}",
            status=500,
            code="internal_error",
        )

    def _answer_headers(self, media_type: str) -> dict[str, str]:
        place, degraded = self._generation.prefill, self._generation.degraded
        headers = {PREFILL_HEADER: place or "", DEGRADED_HEADER: ", ".join(degraded)}
        return {"content-type": media_type} | {
            name: value for name, value in headers.items() if value
        }


async def _send(send: Send, body: bytes | None) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _unless_disconnected(receive: Receive, answer: Coroutine[Any, Any, None]) -> bool:
    """True if `answer` ended by itself.  In the running task: another one would cost more."""
    task, has_left = asyncio.current_task(), False
    assert task is not None, "an answer is given in a task"

    def leave(_: asyncio.Task[None]) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    gone = asyncio.create_task(_disconnected(receive))
    gone.add_done_callback(leave)
    try:
        await answer
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise
        return False
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()  # it ends by itself: to wait for that would hold up the next request
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
