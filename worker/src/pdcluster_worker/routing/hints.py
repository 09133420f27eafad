"""Routing hints of a request, as far as the policy allows.

Parsed by `server.schemas.route_fields`, used by `serving.ingress.decode_router`.
"""

from dataclasses import dataclass

from pdcluster_worker.config.routing import DecodeScorePolicy


@dataclass(frozen=True, slots=True)
class RouteHints:
    """Hints of one request.

    session:      what belongs together; "" = nothing.
    worker:       the one that must run it; "" = any.
    decode_score: in place of the policy's; None = the policy's.
    """

    session: str = ""
    worker: str = ""
    decode_score: DecodeScorePolicy | None = None


NO_HINTS = RouteHints()
