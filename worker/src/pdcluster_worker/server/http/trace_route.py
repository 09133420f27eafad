"""GET /debug/requests/ID: the journey of a request that has ended, for `pdctl why --request`.

It names workers and numbers of tokens, nothing of a prompt.  Where API keys are
asked for it is for clients with one, wherever they are: a proxy in the pod brings
the requests of strangers from a loopback address.
"""

from typing import Any

from fastapi import FastAPI, Request

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.authorization import TenantOfKey, presented_key
from pdcluster_worker.tracing.recent_traces import RecentTraces, as_json

PATH = "/debug/requests"


def add_trace_route(app: FastAPI, traces: RecentTraces, tenant_of: TenantOfKey) -> None:
    """Serve what `tracing.recent_traces` keeps."""

    @app.get(f"{PATH}/{{request_id}}", include_in_schema=False)
    async def trace(request_id: str, request: Request) -> dict[str, Any]:
        if not _is_allowed(request, tenant_of):
            message = "an API key is asked for: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        found = traces.find(request_id)
        if not found:
            message = (
                f"no request {quoted(request_id)} has ended here recently: ask the worker that "
                "answered it, which keeps the last ones"
            )
            raise RequestError(message, status=404, code="request_not_found")
        return {"journeys": [as_json(each) for each in found]}


def _is_allowed(request: Request, tenant_of: TenantOfKey) -> bool:
    if tenant_of is None:
        return True
    key = presented_key(request.scope)
    return key is not None and tenant_of(key) is not None
