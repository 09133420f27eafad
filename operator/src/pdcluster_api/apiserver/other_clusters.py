"""Another PDCluster, as one that hands requests on to it sees it. Pure."""

from typing import Any

from pdcluster_api.apiserver.kinds import Body
from pdcluster_api.plan.observed.state import OtherCluster, Previous
from pdcluster_schema.conditions import SCALED_TO_ZERO, SERVING
from pdcluster_schema.ports import HTTP_PORT


def other_cluster(body: Body) -> OtherCluster:
    """Its spec may be one that its own reconcile refuses."""
    spec = _mapping(body.get("spec"))
    model, service = _mapping(spec.get("model")), _mapping(spec.get("service"))
    adapters = model.get("adapters")
    named = [model, *(adapters if isinstance(adapters, list) else ())]
    names = (_mapping(each).get("name") for each in named)
    port, secret = service.get("port", HTTP_PORT), service.get("apiKeySecret")
    serving = Previous(_mapping(body.get("status"))).condition(SERVING)
    sleeps = serving.get("reason") == SCALED_TO_ZERO  # a request wakes it
    return OtherCluster(
        tuple(name for name in names if isinstance(name, str)),
        port if isinstance(port, int) else HTTP_PORT,
        is_serving=serving.get("status") == "True" or sleeps,
        api_key_secret=secret if isinstance(secret, str) else None,
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
