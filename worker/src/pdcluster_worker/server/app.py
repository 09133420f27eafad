"""The HTTP application: routes and middleware, put together for a role."""

import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.service import ANY, CorsSpec
from pdcluster_schema.text import quoted
from pdcluster_worker import __version__
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.qos.tenants import Tenants
from pdcluster_worker.server.adapter_routes import adapter_routes
from pdcluster_worker.server.anthropic.route import COUNT_PATH, message_routes
from pdcluster_worker.server.errors import MESSAGES, error_handlers, response_for
from pdcluster_worker.server.generation.chat_answer import ParserNames, model_parsers
from pdcluster_worker.server.generation.front_end import FrontEnd
from pdcluster_worker.server.generation.generation import Backend, ServingContext, WorkerView
from pdcluster_worker.server.http.api_keys import Authorization, TenantOfKey
from pdcluster_worker.server.http.handed_on import MODEL_HEADER
from pdcluster_worker.server.http.limits import BodyReader, EarlyResponse, LimitsNow, limits_of
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.http.request_context import IGNORED_HEADER, RequestContextMiddleware
from pdcluster_worker.server.http.routes import document
from pdcluster_worker.server.openai.completions import CHAT, COMPLETIONS, completion_routes
from pdcluster_worker.server.openai.embeddings import embedding_routes
from pdcluster_worker.server.openai.own_front_end import OwnFrontEnd
from pdcluster_worker.server.openai.tokenize_route import DETOKENIZE, TOKENIZE, tokenize_routes
from pdcluster_worker.server.page.route import page_routes
from pdcluster_worker.server.responses.route import PATH as RESPONSES
from pdcluster_worker.server.responses.route import response_routes
from pdcluster_worker.server.state_routes import model_routes, state_routes, trace_route
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS
from pdcluster_worker.tracing.request_trace import RecentTraces

DEFAULT_PARSERS = ParserNames()
OWN = OwnFrontEnd()

_TITLE = "PDCluster worker"

EXPOSED = (
    "x-request-id",
    "retry-after",
    "x-pdcluster-prefill",
    "x-pdcluster-degraded",
    MODEL_HEADER,
    IGNORED_HEADER,
    "x-pdcluster-route",
)
"""Headers of answers that a page may read, in addition to the CORS-safelisted ones."""


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float] = time.monotonic,
    *,
    tenant_of: TenantOfKey = None,
    limits: LimitsNow | None = None,
    traces: RecentTraces | None = None,
    parsers: ParserNames = DEFAULT_PARSERS,
    front_end: FrontEnd = OWN,
    open_answers: OpenAnswers | None = None,
) -> Starlette:
    """policy: in force now.  limits: None = by the policy."""
    limits = limits or _limits_by(policy)
    open_answers = open_answers or OpenAnswers()
    serving = ServingContext(
        *(backend, tokenizer, metrics, policy, clock, Tenants(clock, backend.num_ingresses)),
        front_end,
        OtherModels(policy, metrics, open_answers),
        model_parsers(parsers, tokenizer.chat_template),
        open_answers,
    )
    reader = BodyReader(lambda: policy().admission.max_body_bytes, limits)
    routes = [
        *completion_routes(serving, reader),
        *embedding_routes(serving, reader),
        *tokenize_routes(serving, reader),
        *message_routes(serving, reader),
        *response_routes(serving, reader),
        *adapter_routes(backend, reader, serving.others),
        *page_routes(backend.overview, backend.model_name if tenant_of is None else "MODEL", clock),
    ]
    return _application(
        *(routes, backend, metrics, policy, clock),
        tenant_of=tenant_of,
        limits=limits,
        traces=traces or RecentTraces(),
        others=serving.others,
    )


def create_prefill_app(
    worker: WorkerView,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float] = time.monotonic,
    *,
    tenant_of: TenantOfKey = None,
    limits: LimitsNow | None = None,
    traces: RecentTraces | None = None,
    role: str = "prefill",
) -> Starlette:
    """The app of a worker whose role serves no clients."""

    async def refuse(request: Request) -> Response:
        raise RequestError(
            f"this is a {role} worker, which serves no clients: send the request to a decode "
            "worker",
            status=404,
        )

    paths = (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE, MESSAGES, COUNT_PATH, RESPONSES, EMBEDDINGS)
    limits = limits or _limits_by(policy)
    reader = BodyReader(lambda: policy().admission.max_body_bytes, limits)
    others = OtherModels(policy, metrics, OpenAnswers())
    routes = [
        *(Route(path, refuse, methods=["POST"]) for path in paths),
        *adapter_routes(worker, reader, others),
    ]
    return _application(
        *(routes, worker, metrics, policy, clock),
        tenant_of=tenant_of,
        limits=limits,
        traces=traces or RecentTraces(),
    )


def _limits_by(policy: Callable[[], PolicyConfig]) -> LimitsNow:
    return lambda: limits_of(policy().http_limits)


def _application(
    routes: Sequence[Route],
    worker: WorkerView,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float],
    *,
    tenant_of: TenantOfKey,
    limits: LimitsNow,
    traces: RecentTraces,
    others: OtherModels | None = None,
) -> Starlette:
    app = Starlette(
        routes=[
            *routes,
            *model_routes(worker, others),
            *state_routes(worker, metrics),
            trace_route(traces, tenant_of),
        ],
        middleware=[
            Middleware(Cors, policy=lambda: policy().cors),
            Middleware(
                RequestContextMiddleware, traces=traces, draining=worker.draining, clock=clock
            ),
            Middleware(EarlyResponse, limits=limits),
            Middleware(Authorization, tenant_of=tenant_of, rejected=metrics.request_rejected),
        ],
        exception_handlers=error_handlers(metrics.request_rejected),
    )
    app.router.redirect_slashes = False

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(app.routes, _TITLE, __version__))

    app.routes.append(Route("/openapi.json", openapi))
    return app


class Cors:
    """Pure ASGI: Starlette's CORS under the policy in force now.  A preflight is answered before a
    key is required, and errors carry the headers too, so that a page can read them.
    """

    def __init__(self, app: ASGIApp, policy: Callable[[], CorsSpec]) -> None:
        self._app = app
        self._policy = policy
        self._current: _PolicyCors | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        policy = self._policy()
        if scope["type"] != "http" or not policy.allowed_origins:
            await self._app(scope, receive, send)
            return
        if self._current is None or self._current.policy != policy:
            self._current = _PolicyCors(self._app, policy)
        await self._current(scope, receive, send)


class _PolicyCors(CORSMiddleware):
    def __init__(self, app: ASGIApp, policy: CorsSpec) -> None:
        super().__init__(
            app,
            allow_origins=policy.allowed_origins,
            allow_methods=policy.allowed_methods,
            allow_headers=policy.allowed_headers,
            allow_credentials=policy.allow_credentials,
            expose_headers=EXPOSED,
            max_age=policy.max_age_seconds,
        )
        self.policy = policy

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        refusal = self._refusal(request_headers)
        if refusal is None:
            return response
        origin = request_headers["origin"]
        allowed = {"access-control-allow-origin": origin} if self.is_allowed_origin(origin) else {}
        return response_for(refusal, {"path": ""}, {**allowed, "vary": response.headers["vary"]})

    def _refusal(self, headers: Headers) -> RequestError | None:
        origin, method = headers["origin"], headers["access-control-request-method"]
        if not self.is_allowed_origin(origin):
            return _not_allowed("origin", origin, "allowedOrigins")
        if method not in self.policy.allowed_methods:
            return _not_allowed("method", method, "allowedMethods")
        if ANY in self.policy.allowed_headers:
            return None
        requested = headers.get("access-control-request-headers", "").split(",")
        names = [name.strip() for name in requested if name.strip()]
        others = [name for name in names if name.lower() not in self.allow_headers]
        return _not_allowed("header", others[0], "allowedHeaders") if others else None


def _not_allowed(what: str, value: str, field: str) -> RequestError:
    message = (
        f"{what} {quoted(value)} is not allowed for pages of other origins: add it to "
        f"service.cors.{field} of the PDCluster"
    )
    return RequestError(message, status=403, code="cors_not_allowed")
