"""The policy of `spec.routing.relaying`: a router that hands on the bytes of requests."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection

RelayingPolicyName = Literal["leastRequest", "roundRobin", "textPrefix"]


class RelayingPolicy(PolicySection, frozen=True):
    """Policy of relaying, see `relay`.

    enabled:      a router relays plain requests; otherwise it tokenizes all of them itself.
    policy:       choice of the worker; textPrefix = the one that had the beginning of this prompt.
    prefix_bytes: of that beginning, as it is in the request.
    max_retries:  other workers that a request is tried at before the router serves it itself.
    """

    enabled: bool = False
    policy: RelayingPolicyName = "leastRequest"
    prefix_bytes: Annotated[int, msgspec.Meta(ge=64, le=65536)] = 1024
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=8)] = 2
