"""Routing hints of a request, as far as the policy allows."""

from dataclasses import dataclass

from pdcluster_schema.routing import DecodeScoreSpec


@dataclass(frozen=True, slots=True)
class RouteHints:
    session: str = ""  # key of affinity; "" = none
    worker: str = ""  # pinned; "" = any
    decode_score: DecodeScoreSpec | None = None  # overrides the policy's


NO_HINTS = RouteHints()
