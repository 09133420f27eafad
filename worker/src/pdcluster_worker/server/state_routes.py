"""Routes of a worker's identity and state, and the traces of ended requests for `pdctl why`."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker import __version__
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.errors import ErrorReply
from pdcluster_worker.server.generation.generation import WorkerView
from pdcluster_worker.server.generation.respond import check_model
from pdcluster_worker.server.http.api_keys import TenantOfKey, presented_key
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.http.routes import Answers, ApiRoute
from pdcluster_worker.tracing.request_trace import RecentTraces, as_json


class ModelCard(BaseModel):
    """A model that this worker serves, with OpenAI's fields and Anthropic's.

    max_model_len: in tokens, left out until the engine is ready; parent: the model of a LoRA
                   adapter.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "pdcluster"
    max_model_len: int | None
    parent: str | None = None


class ModelList(BaseModel):
    """The model and its adapters, and those of other clusters that are served here, on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False


class HealthState(BaseModel):
    """Answer of /health and /ready; reason: null when all is well."""

    status: Literal["ok", "unavailable"]
    reason: str | None


class DeviceState(BaseModel):
    """Device that the engine computes on.

    kind: cpu or cuda, and of a stock engine also rocm, tpu, xpu or unknown; name: of the processor
          or the accelerator.
    operations: what the model is computed by ("reference": plain torch, without compiled kernels).
    model_code: whose code computes the layers, decoder (ours) or transformers.
    tensor_parallel_size, pipeline_parallel_size: its ranks are their product.
    note: what a user must know of computing on it, such as why operations is reference, and the
          fix; left out where there is nothing.  engine_note: of a stock engine's version likewise.
    """

    kind: str
    name: str
    operations: str = ""
    model_code: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    note: str = ""
    engine_note: str | None = None


class VersionReply(BaseModel):
    """Answer of /version.  device and scheduler: null until the engine has loaded.

    max_model_len: most tokens of one request, prompt and output; left out until the engine has
                   loaded.
    note: why that is lower than the model's own length; left out where it is not, or was asked for.
    """

    version: str
    device: DeviceState | None
    scheduler: str | None
    max_model_len: int | None = None
    note: str = ""


_HEALTH: Answers = {200: HealthState, 503: HealthState}


def json_response(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def model_routes(worker: WorkerView, others: OtherModels | None) -> list[Route]:
    """others: None where no clients are served."""
    created = int(time.time())

    async def models(request: Request) -> Response:
        cards = [own_card(name) for name in (worker.model_name, *worker.adapters)]
        cards += await other_cards(request)
        listed = ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)
        return _without_none(listed)

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        found = [each for each in await other_cards(request, name) if each.id == name]
        if not found:
            check_model(name, worker, others)
        return _without_none(found[0] if found else own_card(name))

    async def other_cards(request: Request, name: str | None = None) -> list[ModelCard]:
        if others is None or (name is not None and name not in others.addresses):
            return []
        lengths = await others.lengths(request.scope, name)
        return [card(each, length) for each, length in lengths.items()]

    def own_card(name: str) -> ModelCard:
        return card(name, worker.max_model_len)

    def card(name: str, max_model_len: int | None) -> ModelCard:
        return ModelCard(
            id=name,
            display_name=name,
            created=created,
            created_at=f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            max_model_len=max_model_len or None,
            parent=worker.model_name if name in worker.adapters else None,
        )

    return [
        ApiRoute("/v1/models", models, {200: ModelList}),
        ApiRoute("/v1/models/{model:path}", model, {200: ModelCard, 404: ErrorReply}),
    ]


def state_routes(worker: WorkerView, metrics: Metrics) -> list[Route]:
    aliases = CollectorRegistry()
    aliases.register(VllmNames(metrics))

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


class VllmNames(Collector):
    """Gauges under vLLM's names, by which an endpoint picker of the Gateway API chooses a worker:
    read from ours, so they never differ.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        metrics = self._metrics
        for name, gauge in (
            ("num_requests_running", metrics.num_requests_running),
            ("num_requests_waiting", metrics.num_requests_waiting),
            ("kv_cache_usage_perc", metrics.kv_cache_usage_ratio),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", _text(gauge), value=_sum(gauge))
        sizes = GaugeMetricFamily(
            "vllm:cache_config_info",
            "always 1; its labels are the tokens of a KV block and the number of blocks",
            labels=("block_size", "num_gpu_blocks"),
        )
        sizes.add_metric((str(metrics.block_size()), str(round(_sum(metrics.kv_blocks)))), 1)
        yield sizes


def _sum(gauge: Gauge) -> float:
    return sum(sample.value for family in gauge.collect() for sample in family.samples)


def _text(gauge: Gauge) -> str:
    return next(iter(gauge.collect())).documentation


def engine_health_route(fault: Callable[[], str | None]) -> Route:
    """For the probe of a stock engine's container: about the engine alone, also during a drain."""

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
