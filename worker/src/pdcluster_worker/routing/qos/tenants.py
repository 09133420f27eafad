"""What each tenant may use of one ingress worker: the limits of its API key, kept by token buckets.

A bucket holds what may be used at once and fills at the limit's rate.  Output
tokens are charged when they have been made, so a bucket may owe; it lets
nothing through until it is filled again.  Limits are those of the policy in
force at each request.  `clock` gives monotonic seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdcluster_worker.config import PolicyConfig
from pdcluster_worker.qos_config import TenantPolicy
from pdcluster_worker.routing.qos.verdict import Refusal, retry_after

KEPT = 0.9
"""Share of its weight that a request's duration keeps at each later one of its tenant."""


def tenant_policy(policy: PolicyConfig, tenant: str) -> TenantPolicy:
    """The limits of a tenant: its own, else those of all others."""
    return policy.tenants.get(tenant, policy.tenant_defaults)


@dataclass(slots=True)
class Bucket:
    """level: what may be used now, None = nothing was counted yet; at: seconds of the clock when that was so."""

    level: float | None = None
    at: float = 0.0

    def fill(self, now: float, rate: float | None, size: float) -> float:
        """Bring the level to now; returns it.  rate: a second; None = there is no limit, and nothing is counted."""
        if rate is None:
            self.level = None
            return size
        filled = size if self.level is None else min(size, self.level + (now - self.at) * rate)
        self.level, self.at = filled, now
        return filled

    def take(self, amount: float) -> None:
        """Use some, or more than there is."""
        if self.level is not None:
            self.level -= amount


@dataclass(slots=True)
class _Usage:
    """Of one tenant.  seconds: that its requests took, a moving average; 0 = none has ended."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    num_open: int = 0
    seconds: float = 0.0


class Tenants:
    """Usage of all tenants of one ingress worker, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def begin(self, tenant: str, limits: TenantPolicy, prompt_tokens: int) -> Refusal | None:
        """Take a request of a tenant, or say why not; what is taken is given back by `end`."""
        usage = self._usage.setdefault(tenant, _Usage())
        refusal = self._excess(usage, tenant, limits, prompt_tokens)
        if refusal is None:
            usage.num_open += 1
            usage.requests.take(1)
            usage.tokens.take(prompt_tokens)
        return refusal

    def end(self, tenant: str, output_tokens: int, seconds: float) -> None:
        """A request that was taken is over, after so many seconds; its answer is charged now."""
        usage = self._usage[tenant]
        usage.num_open -= 1
        usage.tokens.take(output_tokens)
        usage.seconds = seconds if usage.seconds == 0 else KEPT * usage.seconds + (1 - KEPT) * seconds

    def _excess(self, usage: _Usage, tenant: str, limits: TenantPolicy, prompt_tokens: int) -> Refusal | None:
        now, whose = self._clock(), f"of the API key {tenant!r}" if tenant else "of all clients"
        per_second, at_once, per_minute = limits.requests_per_second, limits.max_concurrent_requests, limits.tokens_per_minute
        level = usage.requests.fill(now, per_second, max(1.0, per_second or 1.0))
        if per_second is not None and level < 1:
            message = f"more than {per_second:g} requests a second {whose} (requestsPerSecond): retry later"
            return Refusal("tenant_requests", message, retry_after((1 - level) / per_second))
        if at_once is not None and usage.num_open >= at_once:
            message = f"{usage.num_open} requests {whose} are open, and at most {at_once} may be (maxConcurrentRequests): retry later"
            return Refusal("tenant_concurrency", message, retry_after(usage.seconds / usage.num_open))
        level = usage.tokens.fill(now, None if per_minute is None else per_minute / 60.0, float(per_minute or 0))
        if per_minute is not None:
            needed = min(prompt_tokens, per_minute)  # a prompt beyond a minute's tokens waits for a full bucket
            if level < needed:
                message = (
                    f"{prompt_tokens} prompt tokens are over what is left of {per_minute} a minute {whose} (tokensPerMinute): retry later"
                )
                return Refusal("tenant_tokens", message, retry_after((needed - level) * 60.0 / per_minute))
        return None
