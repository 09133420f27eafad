"""Limits of each tenant (API key), kept by token buckets; each ingress enforces an even share.

Output tokens are charged afterwards, so a bucket may go below 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import TenantSpec
from pdcluster_worker.routing.qos.load_shedding import LoadRefusal, retry_after

KEPT = 0.9  # weight of the average at each later request of the tenant

HALVED_SECONDS = 60.0  # and half-life without one


def tenant_policy(policy: PolicyConfig, tenant: str) -> TenantSpec:
    return policy.tenants.get(tenant, policy.tenant_defaults)


def share_of(limits: TenantSpec, num_ingresses: int) -> TenantSpec:
    """Share of the limits for each ingress; whole numbers are at least 1."""
    if num_ingresses <= 1:
        return limits
    rate, at_once, tokens = (
        limits.requests_per_second,
        limits.max_concurrent_requests,
        limits.tokens_per_minute,
    )
    return limits.model_copy(
        update={
            "requests_per_second": None if rate is None else rate / num_ingresses,
            "max_concurrent_requests": None
            if at_once is None
            else max(1, at_once // num_ingresses),
            "tokens_per_minute": None if tokens is None else max(1, tokens // num_ingresses),
        }
    )


@dataclass(frozen=True, slots=True)
class Demand:
    prompt_tokens: int  # of each prompt once: its choices share them
    num_sequences: int = 1  # choices of all prompts


@dataclass(slots=True)
class Bucket:
    level: float | None = None  # None = nothing counted yet
    at: float = 0.0  # time of `level`

    def fill(self, now: float, rate: float | None, size: float) -> float:
        """Refill the bucket up to now and return its level.  rate: a second; None = no limit."""
        if rate is None:
            self.level = None
            return size
        filled = size if self.level is None else min(size, self.level + (now - self.at) * rate)
        self.level, self.at = filled, now
        return filled

    def take(self, amount: float) -> None:
        """The level may go below 0."""
        if self.level is not None:
            self.level -= amount


@dataclass(slots=True)
class _TenantUsage:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    num_open: int = 0  # sequences
    seconds: float = 0.0  # mean duration of requests; 0 = none has ended
    ended_at: float = 0.0

    def ended(self, now: float, seconds: float) -> None:
        kept = KEPT * 0.5 ** ((now - self.ended_at) / HALVED_SECONDS) if self.seconds else 0.0
        self.seconds = kept * self.seconds + (1 - kept) * seconds
        self.ended_at = now


class Tenants:
    """num_ingresses: ingress workers that share the limits, this one included."""

    def __init__(
        self, clock: Callable[[], float], num_ingresses: Callable[[], int] = lambda: 1
    ) -> None:
        self._clock = clock
        self._num_ingresses = num_ingresses
        self._usage: dict[str, _TenantUsage] = {}

    def begin(self, tenant: str, limits: TenantSpec, demand: Demand) -> LoadRefusal | None:
        """Admit a request, to be returned by `end`, or refuse it."""
        usage = self._usage.setdefault(tenant, _TenantUsage())
        refusal = self._excess(usage, tenant, limits, demand)
        if refusal is None:
            usage.num_open += demand.num_sequences
            usage.requests.take(demand.num_sequences)
            usage.tokens.take(demand.prompt_tokens)
        return refusal

    def end(self, tenant: str, demand: Demand, output_tokens: int, seconds: float) -> None:
        """Charge the output tokens of an admitted request."""
        usage = self._usage[tenant]
        usage.num_open -= demand.num_sequences
        usage.tokens.take(output_tokens)
        usage.ended(self._clock(), seconds)

    def _excess(
        self, usage: _TenantUsage, tenant: str, limits: TenantSpec, demand: Demand
    ) -> LoadRefusal | None:
        num_ingresses = self._num_ingresses()
        share = share_of(limits, num_ingresses)
        whose = f"of the API key {tenant!r}" if tenant else "of all clients"
        if num_ingresses > 1:
            whose += f" at this one of {num_ingresses} ingress workers"
        return (
            self._beyond_rate(usage, share, demand, whose)
            or _beyond_concurrency(usage, share, demand, whose)
            or self._beyond_tokens(usage, share, demand, whose)
        )

    def _beyond_rate(
        self, usage: _TenantUsage, share: TenantSpec, demand: Demand, whose: str
    ) -> LoadRefusal | None:
        rate = share.requests_per_second
        size = max(1.0, rate or 1.0)
        level = usage.requests.fill(self._clock(), rate, size)
        # a larger one waits for a full bucket and takes it below 0
        needed = min(demand.num_sequences, size)
        if rate is None or level >= needed:
            return None
        message = (
            f"more than {rate:g} requests a second {whose} (requestsPerSecond; each choice of each "
            "prompt is one): retry later"
        )
        return LoadRefusal("tenant_requests", message, retry_after((needed - level) / rate))

    def _beyond_tokens(
        self, usage: _TenantUsage, share: TenantSpec, demand: Demand, whose: str
    ) -> LoadRefusal | None:
        limit = share.tokens_per_minute
        level = usage.tokens.fill(
            self._clock(), None if limit is None else limit / 60.0, float(limit or 0)
        )
        if limit is None:
            return None
        # a prompt beyond a minute's tokens waits for a full bucket
        needed = min(demand.prompt_tokens, limit)
        if level >= needed:
            return None
        message = (
            f"{demand.prompt_tokens} prompt tokens are over what is left of {limit} a minute "
            f"{whose} (tokensPerMinute): retry later"
        )
        return LoadRefusal("tenant_tokens", message, retry_after((needed - level) * 60.0 / limit))


def _beyond_concurrency(
    usage: _TenantUsage, share: TenantSpec, demand: Demand, whose: str
) -> LoadRefusal | None:
    at_once = share.max_concurrent_requests
    # A request larger than the share runs alone; one larger than the limit was refused before.
    if at_once is None or not usage.num_open or usage.num_open + demand.num_sequences <= at_once:
        return None
    message = (
        f"{usage.num_open} requests {whose} are open, and at most {at_once} may be "
        "(maxConcurrentRequests): retry later"
    )
    return LoadRefusal("tenant_concurrency", message, retry_after(usage.seconds / usage.num_open))
