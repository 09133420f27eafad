"""The HTTP application: routes and middleware, put together for a role; a prefill worker's answers
a client that it came to the wrong worker.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker import __version__
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.qos.tenants import Tenants
from pdcluster_worker.server.anthropic.route import COUNT_PATH, message_routes
from pdcluster_worker.server.errors.anthropic import PATH as MESSAGES
from pdcluster_worker.server.errors.handlers import error_handlers
from pdcluster_worker.server.generation.backend import Backend, WorkerView
from pdcluster_worker.server.generation.chat_answer import ParserNames, model_parsers
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.http.authorization import Authorization, TenantOfKey
from pdcluster_worker.server.http.body_reader import BodyReader
from pdcluster_worker.server.http.cors import Cors
from pdcluster_worker.server.http.early_response import EarlyResponse
from pdcluster_worker.server.http.limits import LimitsNow, limits_of
from pdcluster_worker.server.http.request_context import RequestContextMiddleware, context_of
from pdcluster_worker.server.http.routes import JsonRoute, document, with_errors
from pdcluster_worker.server.http.verify_route import VerifyHandler, verify_route
from pdcluster_worker.server.openai import chat, completion
from pdcluster_worker.server.openai.protocol import ChatReply, CompletionReply
from pdcluster_worker.server.openai.tokenize_route import (
    DETOKENIZE,
    TOKENIZE,
    tokenize_routes,
)
from pdcluster_worker.server.responses.route import PATH as RESPONSES
from pdcluster_worker.server.responses.route import response_routes
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.state_routes import model_routes, state_routes, trace_route
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.tracing.recent_traces import RecentTraces

DEFAULT_PARSERS = ParserNames()

_TITLE = "PDCluster worker"
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


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
    verifying: VerifyHandler | None = None,
) -> Starlette:
    """policy: in force now.  limits: None = by the policy.  verifying: None = this worker takes no
    KV.
    """
    settings = _Settings(policy, clock, tenant_of, limits, traces or RecentTraces())
    serving = ServingContext(
        backend,
        tokenizer,
        metrics,
        policy,
        clock,
        Tenants(clock, backend.num_ingresses),
        model_parsers(parsers, tokenizer.chat_template),
    )
    reader = BodyReader(lambda: policy().admission.max_body_bytes, settings.limits_now)
    routes = [
        *_completion_routes(serving, reader),
        *tokenize_routes(serving, reader),
        *message_routes(serving, reader),
        *response_routes(serving, reader),
    ]
    if verifying is not None:
        routes.append(verify_route(verifying))
    return _application(routes, backend, metrics, settings)


def create_prefill_app(
    worker: WorkerView,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float] = time.monotonic,
    *,
    tenant_of: TenantOfKey = None,
    limits: LimitsNow | None = None,
    traces: RecentTraces | None = None,
) -> Starlette:
    async def refuse(request: Request) -> Response:
        raise RequestError(
            "this is a prefill worker, which serves no clients: send the request to a decode "
            "worker",
            status=404,
        )

    paths = (_CHAT, _COMPLETIONS, TOKENIZE, DETOKENIZE, MESSAGES, COUNT_PATH, RESPONSES)
    routes = [Route(path, refuse, methods=["POST"]) for path in paths]
    settings = _Settings(policy, clock, tenant_of, limits, traces or RecentTraces())
    return _application(routes, worker, metrics, settings)


@dataclass(frozen=True, slots=True)
class _Settings:
    policy: Callable[[], PolicyConfig]
    clock: Callable[[], float]
    tenant_of: TenantOfKey
    limits: LimitsNow | None
    traces: RecentTraces

    @property
    def limits_now(self) -> LimitsNow:
        return self.limits or (lambda: limits_of(self.policy().http_limits))


def _completion_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat.complete(serving, body, context_of(request))

    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await completion.complete(serving, body, context_of(request))

    return [
        JsonRoute(path, kind, handle, with_errors(reply), reader=reader, streams=True)
        for path, kind, handle, reply in (
            (_CHAT, ChatRequest, chat_completions, ChatReply),
            (_COMPLETIONS, CompletionRequest, completions, CompletionReply),
        )
    ]


def _application(
    routes: Sequence[Route], worker: WorkerView, metrics: Metrics, settings: _Settings
) -> Starlette:
    policy, tenant_of = settings.policy, settings.tenant_of
    app = Starlette(
        routes=[
            *routes,
            *model_routes(worker),
            *state_routes(worker, metrics),
            trace_route(settings.traces, tenant_of),
        ],
        middleware=[
            Middleware(Cors, policy=lambda: policy().cors),
            Middleware(
                RequestContextMiddleware,
                traces=settings.traces,
                draining=worker.draining,
                clock=settings.clock,
            ),
            Middleware(EarlyResponse, limits=settings.limits_now),
            Middleware(Authorization, tenant_of=tenant_of, rejected=metrics.request_rejected),
        ],
        exception_handlers=error_handlers(metrics.request_rejected),
    )
    app.router.redirect_slashes = False

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(app.routes, _TITLE, __version__))

    app.routes.append(Route("/openapi.json", openapi))
    return app
