"""Routes of a worker's identity and state: /v1/models, /health, /ready, /version, /metrics, and the
traces of ended requests, for `pdctl why --request`.
"""

import time
from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker import __version__
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics, vllm_names
from pdcluster_worker.server.errors import ErrorReply
from pdcluster_worker.server.generation.backend import WorkerView
from pdcluster_worker.server.generation.respond import check_model
from pdcluster_worker.server.http.api_keys import TenantOfKey, presented_key
from pdcluster_worker.server.http.routes import Answers, ApiRoute
from pdcluster_worker.server.openai.protocol import (
    DeviceState,
    HealthState,
    ModelCard,
    ModelList,
    VersionReply,
)
from pdcluster_worker.tracing.recent_traces import RecentTraces, as_json

_HEALTH: Answers = {200: HealthState, 503: HealthState}


def json_response(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def model_routes(worker: WorkerView) -> list[Route]:
    created = int(time.time())

    async def models(request: Request) -> Response:
        return _without_none(ModelList(data=[card()]))

    async def model(request: Request) -> Response:
        check_model(request.path_params["model"], worker.model_name)
        return _without_none(card())

    def card() -> ModelCard:
        return ModelCard(
            id=worker.model_name, created=created, max_model_len=worker.max_model_len or None
        )

    return [
        ApiRoute("/v1/models", models, {200: ModelList}),
        ApiRoute("/v1/models/{model:path}", model, {200: ModelCard, 404: ErrorReply}),
    ]


def state_routes(worker: WorkerView, metrics: Metrics) -> list[Route]:
    aliases = vllm_names(metrics)

    async def health(request: Request) -> Response:
        return _state(worker.alive(), worker.shortfall())

    async def ready(request: Request) -> Response:
        return _state(worker.alive() or worker.ready(), worker.shortfall())

    async def version(request: Request) -> Response:
        reply = _version(worker)
        return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")

    async def prometheus(request: Request) -> Response:
        page = generate_latest(metrics.registry) + generate_latest(aliases)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return [
        ApiRoute("/health", health, _HEALTH),
        ApiRoute("/ready", ready, _HEALTH),
        ApiRoute("/version", version, {200: VersionReply}),
        ApiRoute("/metrics", prometheus, {200: str}),
    ]


def engine_health_route(fault: Callable[[], str | None]) -> Route:
    """For the probe of a stock engine's container: about the engine alone, also while the worker
    drains.
    """

    async def engine_health(request: Request) -> Response:
        reason = fault()
        return PlainTextResponse(reason or "ok", 200 if reason is None else 503)

    return Route("/engine/health", engine_health)


def _without_none(body: BaseModel) -> Response:
    return Response(body.model_dump_json(exclude_none=True), media_type="application/json")


def _version(worker: WorkerView) -> VersionReply:
    device = worker.device
    if device is None:
        return VersionReply(version=__version__, device=None, scheduler=None)
    known = {name: value for name, value in msgspec.structs.asdict(device).items() if value}
    note = {"note": worker.length_note} if worker.length_note else {}
    return VersionReply(
        version=__version__,
        device=DeviceState(**known),
        scheduler=worker.scheduler,
        max_model_len=worker.max_model_len,
        **note,
    )


def _state(reason: str | None, shortfall: str | None) -> Response:
    if reason is None:
        return json_response(HealthState(status="ok", reason=shortfall))
    return json_response(HealthState(status="unavailable", reason=reason), 503)


def trace_route(traces: RecentTraces, tenant_of: TenantOfKey) -> Route:
    async def trace(request: Request) -> Response:
        if not _is_allowed(request, tenant_of):
            message = "an API key is asked for: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        request_id = request.path_params["request_id"]
        found = traces.find(request_id)
        if not found:
            message = (
                f"no request {quoted(request_id)} has ended here recently: ask the worker that "
                "answered it, which keeps the last ones"
            )
            raise RequestError(message, status=404, code="request_not_found")
        return JSONResponse({"journeys": [as_json(each) for each in found]})

    return Route("/debug/requests/{request_id}", trace)


def _is_allowed(request: Request, tenant_of: TenantOfKey) -> bool:
    if tenant_of is None:
        return True
    key = presented_key(request.scope)
    return key is not None and tenant_of(key) is not None
