"""The policy of `spec.routing.relaying`: a router that proxies raw requests."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection

RelayingPolicyName = Literal["leastRequest", "roundRobin", "textPrefix"]


class RelayingPolicy(PolicySection, frozen=True):
    enabled: bool = False  # else the router tokenizes all requests itself
    # textPrefix = same start of the prompt, same worker
    policy: RelayingPolicyName = "leastRequest"
    prefix_bytes: Annotated[int, msgspec.Meta(ge=64, le=65536)] = 1024
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=8)] = 2  # then the router serves it itself
