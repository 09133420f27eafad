"""Pure ASGI: gives each request an id of ours and a trace, and turns a bug into a 500."""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from urllib.parse import quote, unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import CONTEXT, is_messages, response_for
from pdcluster_worker.tracing import trace_context
from pdcluster_worker.tracing.request_trace import (
    MAX_ROUTE_CHARACTERS,
    RecentTraces,
    RequestTrace,
    add_event,
    route_of,
)

logger = logging.getLogger(__name__)

ROUTE_HEADER = "x-pdcluster-route"
"""Header of a request that asks for the same one in the answer, with any value but these."""

IGNORED_HEADER = "x-pdcluster-ignored"
"""Header of an answer: the fields of the request's body that changed nothing, at most so many."""

_MAX_IGNORED = 16

PREFILLER_HEADER = "x-prefiller-host-port"
"""Header with the host:port of the prefill worker to use; of several the first counts."""

REQUESTED_MODEL_HEADER = "x-pdcluster-requested-model"
"""Header of a request that another cluster has handed on: the model that its client has named."""

_NO = ("", "0", "false")
_LABEL_CHARACTERS = 64
_ADDRESS_CHARACTERS = 260


@dataclass(frozen=True, slots=True)
class RequestContext:
    """label: the client's id.  key_digest: SHA-256 of its API key.  tenant: of that key.
    prefiller: host:port of the prefill worker that an endpoint picker has chosen; "" = none.
    ignored: fields of the body that change nothing, as a header names them.
    requested_model: that the client has named, of a request which another cluster has handed on.
    """

    request_id: str
    arrival_seconds: float
    label: str
    key_digest: bytes = b""
    tenant: str = ""
    prefiller: str = ""
    num_body_bytes: int = 0
    ignored: str = ""
    requested_model: str = ""


def header_of(name: str) -> str:
    """A model's name as a header has it."""
    return quote(name, safe="/:@+,=!~ ").strip()


def context_in(scope: Scope) -> RequestContext:
    context: RequestContext = scope[CONTEXT]
    return context


def context_of(request: Request) -> RequestContext:
    return context_in(request.scope)


def may_generate(path: str) -> bool:
    return path not in ("/tokenize", "/detokenize", "/v1/embeddings") and not path.endswith(
        "/count_tokens"
    )


def note_key(scope: Scope, key: str, tenant: str) -> None:
    digest = sha256(key.encode(errors="surrogateescape")).digest()
    scope[CONTEXT] = replace(scope[CONTEXT], key_digest=digest, tenant=tenant)


def note_body(scope: Scope, num_bytes: int) -> None:
    scope[CONTEXT] = replace(scope[CONTEXT], num_body_bytes=num_bytes)


def note_ignored(scope: Scope, names: Sequence[str]) -> None:
    shown = [quote(name[:_LABEL_CHARACTERS], errors="replace") for name in names[:_MAX_IGNORED]]
    more = ["..."] if len(names) > _MAX_IGNORED else []
    ignored = shortened(", ".join([*shown, *more]), MAX_ROUTE_CHARACTERS)
    scope[CONTEXT] = replace(scope[CONTEXT], ignored=ignored)


class RequestContextMiddleware:
    """draining: every answer asks to close, so that the next goes to a worker that stays."""

    def __init__(
        self,
        app: ASGIApp,
        traces: RecentTraces,
        draining: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._traces = traces
        self._draining = draining
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; log an exception that it lets through, and answer 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        prefiller = headers.get(PREFILLER_HEADER, "").partition(",")[0].strip()
        context = scope[CONTEXT] = RequestContext(
            uuid.uuid4().hex,
            self._clock(),
            headers.get("x-request-id", "")[:_LABEL_CHARACTERS],
            prefiller=prefiller[:_ADDRESS_CHARACTERS],
            requested_model=unquote(headers.get(REQUESTED_MODEL_HEADER, "")),
        )
        if scope["method"] != "POST" or not may_generate(scope["path"]):
            await self._answer(scope, receive, send, context)
            return
        parent, state = trace_context.HEADER, trace_context.STATE_HEADER
        trace_context.enter(headers.get(parent, ""), headers.get(state, ""))  # the first of several
        shows = headers.get(ROUTE_HEADER, "").lower() not in _NO
        with self._traces.of(context.request_id, role="ingress") as trace:
            await self._answer(scope, receive, send, context, trace, shows=shows)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        context: RequestContext,
        trace: RequestTrace | None = None,
        *,
        shows: bool = False,
    ) -> None:
        """shows: the route that the trace tells."""
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.request_id
                if is_messages(scope["path"]):
                    headers["request-id"] = context.request_id
                if ignored := scope[CONTEXT].ignored:
                    headers[IGNORED_HEADER] = ignored
                if self._draining():
                    headers["connection"] = "close"
                if trace is not None:
                    add_event("answered", status=message["status"])
                    if shows:
                        headers[ROUTE_HEADER] = route_of(trace)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception(
                "unhandled error request=%s label=%r path=%r",
                context.request_id,
                context.label,
                scope["path"],
            )
            if started:
                raise  # the server closes the connection: an answer cut short must not look whole
            error = RequestError(
                f"internal error: see the worker's log for request {context.request_id}",
                status=500,
                code="internal_error",
            )
            await response_for(error, scope)(scope, receive, send_with_id)
