"""The policy of `spec.routing.relaying`: a router that proxies raw requests."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection

RelayingPolicyName = Literal["leastRequest", "roundRobin", "textPrefix"]


class RelayingPolicy(PolicySection, frozen=True):
    """enabled:      proxy plain requests; else the router tokenizes all of them itself.
    policy:       textPrefix = the worker that got the same start of a prompt.
    prefix_bytes: length of that start.
    max_retries:  other workers to try before the router serves the request itself.
    """

    enabled: bool = False
    policy: RelayingPolicyName = "leastRequest"
    prefix_bytes: Annotated[int, msgspec.Meta(ge=64, le=65536)] = 1024
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=8)] = 2
