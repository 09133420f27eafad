"""The policy file, which may change while a worker runs; unknown fields are only logged."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from pdcluster_worker.config.documents import converted, document_of
from pdcluster_worker.config.http import CorsPolicy, HttpLimitsPolicy
from pdcluster_worker.config.migration import MovingPolicy, RacingPolicy
from pdcluster_worker.config.proxy import RelayingPolicy
from pdcluster_worker.config.qos import (
    DegradationPolicy,
    EarlyRejectionPolicy,
    EstimationPolicy,
    HighPriorityPolicy,
    LowPriorityPolicy,
    SloPolicy,
    TenantPolicy,
)
from pdcluster_worker.config.routing import (
    CreditPolicy,
    DecodeScorePolicy,
    OffloadPolicy,
    PrefillQueuePolicy,
    PrefillScorePolicy,
)
from pdcluster_worker.config.section import Natural, PolicySection, Positive, Section

logger = logging.getLogger(__name__)


class AdmissionPolicy(PolicySection, frozen=True):
    """Limits of the ingress: 503 over the queue's, 413 over the body's."""

    max_queued_requests: Positive = 1024  # without a first token
    max_queued_tokens: Natural = 0  # of their prompts; 0 = no limit
    max_body_bytes: Positive = 4 << 20
    # while no decode worker takes new requests
    worker_wait_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 0.0


class PolicyConfig(PolicySection, frozen=True):
    offload: OffloadPolicy = OffloadPolicy()
    prefill_score: PrefillScorePolicy = PrefillScorePolicy()
    prefill_queue: PrefillQueuePolicy = PrefillQueuePolicy()
    credits: CreditPolicy = CreditPolicy()
    decode_score: DecodeScorePolicy = DecodeScorePolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
    slo: SloPolicy = SloPolicy()
    early_rejection: EarlyRejectionPolicy = EarlyRejectionPolicy()
    high_priority: HighPriorityPolicy = HighPriorityPolicy()
    low_priority: LowPriorityPolicy = LowPriorityPolicy()
    degradation: DegradationPolicy = DegradationPolicy()
    estimation: EstimationPolicy = EstimationPolicy()
    tenant_defaults: TenantPolicy = TenantPolicy()
    # by the file name of the API key
    tenants: dict[str, TenantPolicy] = msgspec.field(default_factory=dict)
    shared_prefix_cache: bool = False  # between API keys
    # in addition to the longest step
    stall_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 20
    allow_client_priority: bool = False  # else refused unless 0
    moving: MovingPolicy = MovingPolicy()
    racing: RacingPolicy = RacingPolicy()
    relaying: RelayingPolicy = RelayingPolicy()
    cors: CorsPolicy = CorsPolicy()
    http_limits: HttpLimitsPolicy = HttpLimitsPolicy()


def load_policy(path: Path) -> PolicyConfig:
    """Raises ConfigError; unknown fields are logged."""
    document = document_of(path)
    policy = converted(path, document, PolicyConfig)
    unknown = list(_unknown_fields(document, PolicyConfig))
    if unknown:
        logger.warning(
            "ignored unknown fields of the policy, applied the others path=%s fields=%s",
            path,
            ",".join(unknown),
        )
    return policy


def _unknown_fields(
    document: Mapping[str, Any], kind: type[Section], prefix: str = ""
) -> Iterator[str]:
    """Paths of fields that are in the document and not in its section `kind`."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in document.items():
        if name not in known:
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping) and (section := _section_in(known[name])) is not None:
            entries = (
                {f"{name}.{key}": entry for key, entry in value.items()}
                if get_origin(known[name]) is dict
                else {name: value}
            )
            for path, entry in entries.items():
                yield from _unknown_fields(entry, section, f"{prefix}{path}.")


def _section_in(kind: Any) -> type[Section] | None:
    """The section that a field is, may be, or maps names to; None for plain values."""
    kinds = (kind, *get_args(kind))
    return next(
        (each for each in kinds if isinstance(each, type) and issubclass(each, Section)), None
    )
