"""The HTTP application: routes, middleware and error shapes, put together for a role.

`create_app` serves generation (decode, mixed); `create_prefill_app` has health
and metrics only, and answers a client that it came to the wrong worker.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from pdcluster_worker import __version__
from pdcluster_worker.config.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.metrics.vllm_names import vllm_names
from pdcluster_worker.routing.qos.tenants import Tenants
from pdcluster_worker.server.anthropic.route import COUNT_PATH as COUNT_TOKENS
from pdcluster_worker.server.anthropic.route import add_messages
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.errors.anthropic import PATH as MESSAGES
from pdcluster_worker.server.errors.openai import ErrorReply
from pdcluster_worker.server.generation.backend import Backend, WorkerView
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.model_parsers import ParserNames, model_parsers
from pdcluster_worker.server.generation.respond import check_model
from pdcluster_worker.server.http.authorization import Authorization, TenantOfKey
from pdcluster_worker.server.http.body_limit import BodyLimit, taken_by
from pdcluster_worker.server.http.body_route import add_body_route
from pdcluster_worker.server.http.connection_limit import ConnectionLimit
from pdcluster_worker.server.http.cors import Cors
from pdcluster_worker.server.http.drain_middleware import DrainMiddleware
from pdcluster_worker.server.http.head import Head
from pdcluster_worker.server.http.limits import LimitsNow, limits_of
from pdcluster_worker.server.http.request_context import RequestContextMiddleware, context_of
from pdcluster_worker.server.http.trace_route import add_trace_route
from pdcluster_worker.server.http.verify_route import VerifyHandler, add_verification
from pdcluster_worker.server.http.worker_app import WorkerApp
from pdcluster_worker.server.openai import chat, completion
from pdcluster_worker.server.openai.protocol import (
    ChatReply,
    CompletionReply,
    DeviceState,
    HealthState,
    ModelCard,
    ModelList,
    VersionReply,
)
from pdcluster_worker.server.openai.tokenize_route import DETOKENIZE, TOKENIZE, add_tokenizing
from pdcluster_worker.server.responses.route import PATH as RESPONSES
from pdcluster_worker.server.responses.route import add_responses
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.tracing.recent_traces import RecentTraces

DEFAULT_PARSERS = ParserNames()

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}},
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}


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
) -> FastAPI:
    """The application of a decode or mixed worker, or of a router.

    policy:      returns the policy in force now
    tenant_of:   see `authorization.Authorization`
    limits:      of clients; None = by the policy
    traces:      where those of requests are kept; None = in new ones
    parsers:     how the model writes calls and reasoning
    verifying:   of KV transfers; None = this worker takes no KV
    """
    middlewares = _Middlewares(tenant_of, limits, traces or RecentTraces())
    app = _new_app(backend, metrics, policy, clock, middlewares)
    serving = ServingContext(
        backend,
        tokenizer,
        metrics,
        policy,
        clock,
        Tenants(clock, backend.num_ingresses),
        model_parsers(parsers, tokenizer.chat_template),
    )

    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat.complete(serving, body, context_of(request))

    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await completion.complete(serving, body, context_of(request))

    # The first routes: those after them are not looked at for a generation.
    add_body_route(app, _CHAT, chat_completions, _documented(ChatReply))
    add_body_route(app, _COMPLETIONS, completions, _documented(CompletionReply))
    add_tokenizing(app, serving)
    add_messages(app, serving, {**_ERRORS, 200: {"content": _STREAM}})
    add_responses(app, serving, {**_ERRORS, 200: {"content": _STREAM}})
    _add_common(app, backend, metrics, middlewares)
    if verifying is not None:
        add_verification(app, verifying)
    return app


def create_prefill_app(
    worker: WorkerView,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float] = time.monotonic,
    *,
    tenant_of: TenantOfKey = None,
    limits: LimitsNow | None = None,
    traces: RecentTraces | None = None,
) -> FastAPI:
    """The application of a prefill worker: everything but generation."""
    middlewares = _Middlewares(tenant_of, limits, traces or RecentTraces())
    app = _new_app(worker, metrics, policy, clock, middlewares)

    async def refuse() -> Response:
        raise RequestError(
            "this is a prefill worker, which serves no clients: send the request to a decode "
            "worker",
            status=404,
        )

    for path in (_CHAT, _COMPLETIONS, TOKENIZE, DETOKENIZE, MESSAGES, COUNT_TOKENS, RESPONSES):
        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
    _add_common(app, worker, metrics, middlewares)
    return app


@dataclass(frozen=True, slots=True)
class _Middlewares:
    """Layers that a request passes before it reaches a route."""

    tenant_of: TenantOfKey
    limits: LimitsNow | None
    traces: RecentTraces


def _new_app(
    worker: WorkerView,
    metrics: Metrics,
    policy: Callable[[], PolicyConfig],
    clock: Callable[[], float],
    middlewares: _Middlewares,
) -> FastAPI:
    app = WorkerApp(
        title="PDCluster worker",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    limits = middlewares.limits or (lambda: limits_of(policy().http_limits))
    rejected = metrics.request_rejected
    app.add_middleware(Head)
    app.add_middleware(
        BodyLimit,
        takes_body=taken_by(app),
        limit=lambda: policy().admission.max_body_bytes,
        limits=limits,
        rejected=rejected,
    )
    app.add_middleware(
        Authorization, tenant_of=middlewares.tenant_of, rejected=rejected, limits=limits
    )
    app.add_middleware(ConnectionLimit, limits=limits, rejected=rejected)
    app.add_middleware(RequestContextMiddleware, traces=middlewares.traces, clock=clock)
    app.add_middleware(Cors, policy=lambda: policy().cors, limits=limits)
    app.add_middleware(DrainMiddleware, draining=worker.draining)
    openai_errors.install(app, metrics.request_rejected, error_shapes.response)
    return app


def _add_common(
    app: FastAPI, worker: WorkerView, metrics: Metrics, middlewares: _Middlewares
) -> None:
    """Routes of workers of every role."""
    _add_models(app, worker)
    _add_state(app, worker, metrics)
    add_trace_route(app, middlewares.traces, middlewares.tenant_of)


def _add_models(app: FastAPI, worker: WorkerView) -> None:
    created = int(time.time())

    @app.get("/v1/models", response_model_exclude_none=True)
    async def models() -> ModelList:
        return ModelList(data=[card()])

    @app.get(
        "/v1/models/{model:path}",
        response_model_exclude_none=True,
        responses={404: {"model": ErrorReply}},
    )
    async def model(model: str) -> ModelCard:
        check_model(model, worker.model_name)
        return card()

    def card() -> ModelCard:
        return ModelCard(
            id=worker.model_name, created=created, max_model_len=worker.max_model_len or None
        )


def _add_state(app: FastAPI, worker: WorkerView, metrics: Metrics) -> None:
    @app.get("/health", response_model=HealthState, responses={503: {"model": HealthState}})
    async def health(response: Response) -> HealthState:
        return _state(response, worker.alive(), worker.shortfall())

    @app.get("/ready", response_model=HealthState, responses={503: {"model": HealthState}})
    async def ready(response: Response) -> HealthState:
        return _state(response, worker.alive() or worker.ready(), worker.shortfall())

    @app.get("/version", response_model_exclude_unset=True)
    async def version() -> VersionReply:
        device = worker.device
        if device is None:
            return VersionReply(version=__version__, device=None, scheduler=None)
        known = {name: value for name, value in msgspec.structs.asdict(device).items() if value}
        note = {"note": worker.length_note} if worker.length_note else {}
        length = worker.max_model_len
        return VersionReply(
            version=__version__,
            device=DeviceState(**known),
            scheduler=worker.scheduler,
            max_model_len=length,
            **note,
        )

    aliases = vllm_names(metrics)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def prometheus() -> Response:
        page = generate_latest(metrics.registry) + generate_latest(aliases)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


def _state(response: Response, reason: str | None, shortfall: str | None) -> HealthState:
    """200 while there is no reason against it; what falls short does not change that."""
    if reason is None:
        return HealthState(status="ok", reason=shortfall)
    response.status_code = 503
    return HealthState(status="unavailable", reason=reason)


def _documented(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Answers of a generation route, for the OpenAPI document."""
    return {**_ERRORS, 200: {"model": reply, "content": _STREAM}}
