"""The policy file of a worker: `spec.routing` and `spec.qos`, and what the operator adds.

A running worker reads it again when it changes.
"""

from typing import Annotated, Literal

from pydantic import Field

from pdcluster_schema.qos import QosSpec
from pdcluster_schema.routing import DEFAULT_LENGTH_THRESHOLD, OffloadSpec, RoutingSpec
from pdcluster_schema.service import CorsSpec, HttpLimitsSpec
from pdcluster_schema.values import Endpoint, Natural


class OffloadPolicy(OffloadSpec):
    """`spec.routing.offload` with thresholds of the decode workers' accelerators.

    length_thresholds: prefill_length_threshold by accelerator; empty = the same for all
    """

    prefill_length_threshold: Natural = DEFAULT_LENGTH_THRESHOLD
    length_thresholds: dict[str, Natural] = Field(default_factory=dict)


class PolicyConfig(RoutingSpec, QosSpec):
    """Settings that may change while a worker runs.

    shared_prefix_cache: between API keys
    models:              `spec.service.models`: host:port of the API of each, by its name; empty
                         while it is not known
    """

    offload: OffloadPolicy = OffloadPolicy()
    stall_seconds: Annotated[int, Field(ge=1, le=3600)] = 20
    shared_prefix_cache: bool = False
    cors: CorsSpec = CorsSpec()
    http_limits: HttpLimitsSpec = HttpLimitsSpec()
    models: dict[str, Endpoint | Literal[""]] = Field(default_factory=dict)
