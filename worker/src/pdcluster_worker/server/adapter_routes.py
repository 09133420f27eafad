"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import field_error
from pdcluster_worker.server.errors import ErrorReply
from pdcluster_worker.server.generation.generation import WorkerView
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.fields import Body, Text
from pdcluster_worker.server.state_routes import json_response

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

Name = Annotated[Text, Field(max_length=128, pattern=r"^[A-Za-z0-9._/:-]+$")]
"""As `model.adapters` has them."""


class LoadRequest(Body):
    """Body of POST /v1/load_lora_adapter.

    lora_name: by which clients call it, in the field `model`.
    lora_path: of its folder, below model.runtimeAdapters.path or relative to it.
    """

    lora_name: Name
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096)]


class UnloadRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name


class AdapterState(BaseModel):
    """Answer of both.  fingerprint, bytes: of what was loaded; free_bytes: that are left."""

    lora_name: str
    fingerprint: str | None = None
    bytes: int | None = None
    free_bytes: int


def adapter_routes(worker: WorkerView, reader: BodyReader, others: OtherModels) -> list[Route]:
    """They change this worker alone: each has adapters of its own."""

    async def load_lora_adapter(body: LoadRequest, request: Request) -> Response:
        name = body.lora_name
        if name == worker.model_name or name in others.addresses:
            raise field_error(
                "lora_name", f"{quoted(name)} is the name of a model here: choose another one"
            )
        loaded = await worker.adapter_calls().load(name, body.lora_path)
        return json_response(
            AdapterState(
                lora_name=name,
                fingerprint=loaded.weights,
                bytes=loaded.num_bytes,
                free_bytes=loaded.free_bytes,
            )
        )

    async def unload_lora_adapter(body: UnloadRequest, request: Request) -> Response:
        left = await worker.adapter_calls().unload(body.lora_name)
        return json_response(AdapterState(lora_name=body.lora_name, free_bytes=left.free_bytes))

    answers = {**with_errors(AdapterState), 403: ErrorReply}
    return [
        JsonRoute(LOAD, LoadRequest, load_lora_adapter, answers, reader=reader, others=others),
        JsonRoute(
            UNLOAD, UnloadRequest, unload_lora_adapter, answers, reader=reader, others=others
        ),
    ]
