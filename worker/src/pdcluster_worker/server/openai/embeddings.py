"""POST /v1/embeddings: by an engine whose model makes embeddings."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_model, not_ready
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.fields import Body, PromptList, Text
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS


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
        check_model(body.model, serving.backend)
        if (reason := serving.backend.ready()) is not None:
            raise not_ready(reason)
        answer = await serving.front_end.embed(body.model_dump(exclude_none=True))
        return Response(answer, media_type="application/json")

    answers = with_errors(EmbeddingReply)
    return [JsonRoute(EMBEDDINGS, EmbeddingRequest, embeddings, answers, reader=reader)]
