"""GET /debug/requests/ID: the trace of a request that has ended, for `pdctl why --request`.  Where
API keys are required it needs one, also from a loopback address: a proxy in the pod has such a one.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.authorization import TenantOfKey, presented_key
from pdcluster_worker.tracing.recent_traces import RecentTraces, as_json


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
