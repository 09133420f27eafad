"""POST /v1/embeddings: by an engine whose model makes embeddings."""

import logging
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_schema.log_lines import log_fields
from pdcluster_worker.errors import field_error
from pdcluster_worker.routing.qos.tenants import Demand, tenant_policy
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_model, not_ready
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.request_context import RequestContext, context_of
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.fields import Body, PromptList, Text
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS, num_embedded

logger = logging.getLogger(__name__)


class EmbeddingRequest(Body):
    """Body of POST /v1/embeddings.

    dimensions:             fewer than the model's, where it can make those.
    truncate_prompt_tokens: most tokens of an input; -1 = as many as the model takes.
    """

    model: Text
    input: PromptList
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None


class Embedding(BaseModel):
    """embedding: little-endian float32 where base64 was asked for."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(BaseModel):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


def embedding_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        check_model(body.model, serving.backend, serving.others)
        if (reason := serving.backend.ready()) is not None:
            raise not_ready(reason)
        answer = await _embed(serving, body, context_of(request))
        return Response(answer, media_type="application/json")

    answers = with_errors(EmbeddingReply)
    return [
        JsonRoute(
            EMBEDDINGS, EmbeddingRequest, embeddings, answers, reader=reader, others=serving.others
        )
    ]


async def _embed(serving: ServingContext, body: EmbeddingRequest, context: RequestContext) -> bytes:
    """The engine's answer, counted as one request of one token for each input."""
    tenant, num_inputs = context.tenant, len(body.input)
    limits = tenant_policy(serving.policy(), tenant)
    most = limits.max_concurrent_requests
    if most is not None and num_inputs > most:
        raise field_error(
            "input",
            f"{num_inputs} inputs are more than the {most} requests that may be open of this API "
            "key (maxConcurrentRequests): send fewer",
        )
    num_known = sum(len(each) for each in body.input if not isinstance(each, str))
    demand = Demand(num_known, num_inputs)
    with serving.limited(tenant, limits.priority or "normal", demand) as late:
        with serving.open_answers.interruptible():
            answer = await serving.front_end.embed(body.model_dump(exclude_none=True))
        num_tokens = num_embedded(answer)
        late.number = max(0, num_tokens - num_known)
    seconds = serving.clock() - context.arrival_seconds
    for _ in range(num_inputs):
        serving.metrics.request_success.labels("stop").inc()
        serving.metrics.e2e_request_latency_seconds.observe(seconds)
    names = {"request": context.request_id, "label": context.label, "model": body.model}
    counts = {"inputs": num_inputs, "prompt_tokens": num_tokens, "seconds": seconds}
    log_fields(logger, "embedded", {**names, **counts})
    return answer
