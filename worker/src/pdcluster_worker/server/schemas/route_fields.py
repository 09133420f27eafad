"""The fields of `pdcluster` that say where a request should run, and what they mean under the
policy in force.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pdcluster_schema.routing import DecodePolicy, DecodeScoreSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints

MAX_WEIGHT = 1e6

PodName = Annotated[str, Field(min_length=1, max_length=253)]
RouteWeight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]

_KV_AWARE = ("overlap_credit", "prefill_load_scale", "prefill_decay", "active_request_weight")


class RouteFields(BaseModel):
    """`pdcluster.route`, for tests: a worker, a policy or weights for one request in place of the
    policy's.

    worker: the pod that must run it.  policy: by which the worker is chosen.
    temperature and the weights of kvAware: as in spec.routing.decodeScore; null = the policy's.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    worker: PodName | None = None
    policy: DecodePolicy | None = None
    temperature: RouteWeight | None = None
    overlap_credit: RouteWeight | None = None
    prefill_load_scale: RouteWeight | None = None
    prefill_decay: RouteWeight | None = None
    active_request_weight: RouteWeight | None = None


def check_route(route: RouteFields | None, policy: DecodeScoreSpec) -> None:
    """Raises RequestError where the policy lets no request say how it is routed."""
    if route is not None and not policy.allow_request_overrides:
        raise RequestError(
            "pdcluster.route: is not allowed here: leave it out, or set "
            "routing.decodeScore.allowRequestOverrides of the PDCluster",
            param="pdcluster.route",
        )


def hints_of(session: str | None, route: RouteFields | None, policy: DecodeScoreSpec) -> RouteHints:
    if route is None:
        return RouteHints(session=session) if session else NO_HINTS
    given = {
        name: value
        for name, value in route.model_dump(exclude={"worker"}).items()
        if value is not None
    }
    weights = {name: given.pop(name) for name in _KV_AWARE if name in given}
    score = (
        policy.model_copy(
            update={"kv_aware": policy.kv_aware.model_copy(update={**weights}), **given}
        )
        if given or weights
        else None
    )
    return RouteHints(session or "", route.worker or "", score)
