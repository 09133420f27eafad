"""A request that is handed on to another cluster's API, and its answer as it comes.

Each has a connection of its own, so that the Service there spreads requests over its workers.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager as Block
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from urllib.parse import quote

import httpx2
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope, Send

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import ERROR_HEADER, error_event
from pdcluster_worker.server.http.request_context import REQUESTED_MODEL_HEADER, header_of
from pdcluster_worker.tracing import trace_context
from pdcluster_worker.tracing.request_trace import add_event

MODEL_HEADER = "x-pdcluster-model"
"""Header of an answer: the model of another cluster that has made it."""

MUTE_STATUS = 504  # of a cluster that takes connections and answers nothing
MAX_ATTEMPTS = 3  # until a worker there takes the request
CONNECT_SECONDS = 2.0
WRITE_SECONDS = 30.0
GET_SECONDS = 2.0

_PASSED = (
    *("authorization", "x-api-key", "content-type", "accept", "user-agent", "x-request-id"),
    *("traceparent", "tracestate"),
)
_KEPT_BACK = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "date", "x-request-id", "request-id"),
    }
)
_GOING_CODES = ("draining", "not_ready")
_GOING = re.compile(rf'"code": ?"({"|".join(_GOING_CODES)})"'.encode())
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # one for all, since each takes milliseconds
# of a host that is gone: after 5 s without a byte, given up after 20 s
_SIGNS_OF_LIFE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            *(("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5)),
            ("TCP_USER_TIMEOUT", 20_000),
        )
        if hasattr(socket, name)
    ),
]


@dataclass(frozen=True, slots=True)
class HandedOn:
    """address: host:port of the API that serves the model `name`.

    stall_seconds: after which without an answer a sign of life is looked for
    """

    name: str
    address: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    stall_seconds: float

    @classmethod
    def of(cls, scope: Scope, name: str, policy: PolicyConfig, body: bytes) -> "HandedOn":
        given = Headers(scope=scope)
        headers = {each: given[each] for each in _PASSED if each in given}
        headers |= trace_context.current()
        address = policy.models[name]
        return cls(name, address, scope["path"], body, headers, policy.stall_seconds)

    def marked(self, requested: str) -> "HandedOn":
        """With the model that the client has named: none hands it on again."""
        return replace(self, headers={**self.headers, REQUESTED_MODEL_HEADER: header_of(requested)})

    @asynccontextmanager
    async def open(
        self, method: str = "POST", read_seconds: float | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """The head of an answer.  Raises httpx2.TransportError."""
        transport = httpx2.AsyncHTTPTransport(
            verify=_NO_TLS, trust_env=False, socket_options=_SIGNS_OF_LIFE
        )
        waits = httpx2.Timeout(read_seconds, connect=CONNECT_SECONDS, write=WRITE_SECONDS)
        given = {**self.headers, "accept-encoding": "identity"}
        # as they came: a client's may have other characters than ASCII
        headers = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
        url = f"http://{self.address}{quote(self.path)}"
        async with (
            httpx2.AsyncClient(transport=transport, timeout=waits, trust_env=False) as client,
            client.stream(method, url, content=self.body, headers=headers) as response,
        ):
            yield response

    async def answer(
        self,
        scope: Scope,
        send: Send,
        interruptible: Callable[[], Block[None]] = nullcontext,
        takes: Callable[[int], bool] = lambda status: True,
    ) -> bool:
        """Send the answer on; False where its status is not taken, and nothing was sent.

        Raises RequestError where none has begun.
        """
        async with AsyncExitStack() as stack:
            with interruptible():
                response = await self._begin(stack)
                add_event(
                    "handed_on",
                    model=self.name,
                    address=self.address,
                    status=response.status_code,
                    request=response.headers.get("x-request-id", ""),
                )
                if not takes(response.status_code):
                    return False
                is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                body = b"" if is_stream else await self._whole(response)
            headers = self._answer_headers(response)
            if not is_stream:
                answer = Response(body, response.status_code, headers)
                await answer(scope, _nothing, send)
                return True
            await self._stream(response, headers, scope, send, interruptible)
        return True

    async def _begin(self, stack: AsyncExitStack) -> httpx2.Response:
        why = "no address of its cluster is known"
        for _ in range(MAX_ATTEMPTS if self.address else 0):
            try:
                async with self._while_alive():
                    response = await stack.enter_async_context(self.open())
                if response.status_code != 503 or not await _is_going(response):
                    return response
                why = f"{self.address} takes no requests now"
            except httpx2.TransportError as e:
                why = f"{self.address}: {str(e) or type(e).__name__}"
        raise self._unavailable(why)

    @asynccontextmanager
    async def _while_alive(self) -> AsyncIterator[None]:
        """An answer may take any time to begin, while its cluster shows that it lives.

        Raises RequestError.
        """
        try:
            async with asyncio.timeout(None) as limit:
                watch = asyncio.create_task(self._end_if_mute(limit))
                try:
                    yield
                finally:
                    watch.cancel()
        except TimeoutError as e:
            raise self.mute(f"not the request for {self.stall_seconds:g} s, nor /health") from e

    async def _end_if_mute(self, limit: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(self.stall_seconds)
            if await self.is_mute():
                limit.reschedule(0)
                return

    async def is_mute(self) -> bool:
        """True if each of some connections is taken, and no answer comes on any."""
        probe = replace(self, path="/health", body=b"")
        for _ in range(MAX_ATTEMPTS):
            try:
                async with probe.open("GET", GET_SECONDS):
                    return False
            except httpx2.ReadTimeout:
                continue
            except httpx2.TransportError:
                return False  # one that ends takes no more connections, and answers what it has
        return True

    async def _whole(self, response: httpx2.Response) -> bytes:
        try:
            return await response.aread()
        except httpx2.TransportError as e:
            raise self._unavailable(f"{self.address} broke off: {e}") from e

    async def _stream(
        self,
        response: httpx2.Response,
        headers: dict[str, str],
        scope: Scope,
        send: Send,
        interruptible: Callable[[], Block[None]],
    ) -> None:
        start = Response(status_code=response.status_code, headers=headers).raw_headers
        shown = [each for each in start if each[0] != b"content-length"]
        status = response.status_code
        await send({"type": "http.response.start", "status": status, "headers": shown})
        end, last = b"", b"\n\n"
        try:
            with interruptible():
                async for chunk in response.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    last = (last + chunk)[-2:]
        except httpx2.TransportError as e:
            end = error_event(self._unavailable(f"{self.address} broke off: {e}"), scope)
        except RequestError as e:
            end = error_event(e, scope)
        if end and last != b"\n\n":
            end = b"\n\n" + end  # half an event came before
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _answer_headers(self, response: httpx2.Response) -> dict[str, str]:
        kept = {k: v for k, v in response.headers.items() if k.lower() not in _KEPT_BACK}
        return {**kept, MODEL_HEADER: header_of(self.name)}

    def mute(self, what: str) -> RequestError:
        return self._unavailable(f"{self.address} answers nothing: {what}", MUTE_STATUS)

    def _unavailable(self, why: str, status: int = 503) -> RequestError:
        return RequestError(
            f"model {self.name!r} cannot be reached ({shortened(why, 200)}): retry later",
            status=status,
            code="model_unavailable",
            retry_after_seconds=1,
        )


async def _is_going(response: httpx2.Response) -> bool:
    """True if the worker that refused takes no requests any more, or none yet."""
    if response.headers.get(ERROR_HEADER) in _GOING_CODES:
        return True
    return _GOING.search(await response.aread()) is not None


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
