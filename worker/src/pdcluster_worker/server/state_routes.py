"""Routes of a worker's identity and state: /v1/models, /health, /ready, /version, /metrics, the
traces of ended requests, for `pdctl why --request`, and the verification of a KV transfer.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker import __version__
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import VerificationResult
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.errors import ErrorReply, response_for
from pdcluster_worker.server.generation.generation import WorkerView
from pdcluster_worker.server.generation.respond import check_model
from pdcluster_worker.server.http.api_keys import TenantOfKey, presented_key
from pdcluster_worker.server.http.json_body import from_validation
from pdcluster_worker.server.http.routes import Answers, ApiRoute
from pdcluster_worker.tracing.request_trace import RecentTraces, as_json

SCHEME = "PDCluster"
SECONDS = 60.0
"""From giving a challenge out to its proof."""

_SEPARATOR = ":"


class ModelCard(BaseModel):
    """A model that this worker serves; max_model_len: in tokens, left out until the engine is
    ready.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdcluster"
    max_model_len: int | None


class ModelList(BaseModel):
    """All of them: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


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
          fix; left out where there is nothing.
    """

    kind: str
    name: str
    operations: str = ""
    model_code: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    note: str = ""


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


@dataclass(frozen=True, slots=True)
class VerifyHandler:
    """run: verify the transfer from that prefill pool; True = even if the workers are busy.

    proof: for these words, under the key as it is now; see `peers.tls.Credentials.proof`.
    """

    run: Callable[[str, bool], Awaitable[VerificationResult]]
    proof: Callable[[str], str]


class Challenges:
    """Challenges that are answered with a proof, each once: random, made by this process, and good
    for a short time.  Nothing is kept for one that is given out, so asking costs no memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def new(self) -> str:
        text = f"{self._clock():.3f}.{secrets.token_hex(16)}"
        return f"{text}.{self._mac(text)}"

    def use(self, challenge: str) -> bool:
        """Take one of which the proof is right; False = not ours, too old, or taken before."""
        text, _, mac = challenge.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return False
        made, now = float(text[: text.rindex(".")]), self._clock()
        self._used = {used: at for used, at in self._used.items() if now - at <= SECONDS}
        if now - made > SECONDS or challenge in self._used:
            return False
        self._used[challenge] = made
        return True

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


class _Query(BaseModel):
    prefill_pool: Annotated[str, Field(min_length=1, max_length=63)]
    even_if_busy: bool = False


def verify_route(handler: VerifyHandler) -> Route:
    challenges = Challenges()

    async def verify(request: Request) -> Response:
        given = dict(request.query_params)
        try:
            query = _Query.model_validate(given)
        except ValidationError as e:
            raise from_validation(e.errors(include_url=False), given) from e
        pool, even_if_busy = query.prefill_pool, query.even_if_busy
        challenge, _, shown = (presented_key(request.scope) or "").rpartition(_SEPARATOR)
        expected = handler.proof(f"{pool} {str(even_if_busy).lower()} {challenge}")
        is_right = hmac.compare_digest(shown.encode(), expected.encode())
        if not is_right or not challenges.use(challenge):
            message = "only the operator and pdctl verify may ask for this"
            error = RequestError(message, status=401, code="invalid_proof")
            header = f"{SCHEME} challenge={challenges.new()}"
            return response_for(error, request.scope, {"www-authenticate": header})
        return JSONResponse(msgspec.to_builtins(await handler.run(pool, even_if_busy)))

    return Route("/verify", verify, methods=["POST"])
