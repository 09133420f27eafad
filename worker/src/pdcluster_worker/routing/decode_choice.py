"""Choice of a decode worker: pinned, then by session, then the lowest cost by the policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, exp
from random import Random

from msgspec.structs import replace

from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.routing.decode_costs import (
    DecodeCandidate,
    RequestSize,
    capacity_aware,
    kv_aware,
    latency_aware,
    least_request,
    prefix_aware,
    round_robin,
)


@dataclass(frozen=True, slots=True)
class RouteHints:
    """Routing hints of a request, as far as the policy allows."""

    session: str = ""  # key of affinity; "" = none
    worker: str = ""  # pinned; "" = any
    decode_score: DecodeScoreSpec | None = None  # overrides the policy's


NO_HINTS = RouteHints()


def with_enough_hits(
    candidates: Sequence[DecodeCandidate], request: RequestSize, min_ratio: float
) -> list[DecodeCandidate]:
    """Clear matches that are a smaller share of the prompt's blocks than `min_ratio`.

    >>> found = with_enough_hits([DecodeCandidate("a", matched_blocks=3), DecodeCandidate("b",
    ...     matched_blocks=2)], RequestSize(64, 16), 0.75)
    >>> [candidate.matched_blocks for candidate in found]
    [3, 0]
    """
    least = min_ratio * request.num_blocks
    # Copy only what changes: this runs for every request and worker.
    return [replace(c, matched_blocks=0) if 0 < c.matched_blocks < least else c for c in candidates]


def without_hot_prefix(
    candidates: Sequence[DecodeCandidate], hot_workers_ratio: float
) -> list[DecodeCandidate]:
    """Subtract the match that this share of the candidates (at least two) have in common."""
    num_hot = max(2, ceil(hot_workers_ratio * len(candidates)))
    matched = sorted((c.matched_blocks for c in candidates), reverse=True)
    hot_blocks = matched[num_hot - 1] if num_hot <= len(matched) else 0
    if not hot_blocks:
        return list(candidates)
    # Copy only what changes: this runs for every request and worker.
    return [
        replace(c, matched_blocks=max(0, c.matched_blocks - hot_blocks)) if c.matched_blocks else c
        for c in candidates
    ]


def within_share(
    candidates: Sequence[DecodeCandidate], max_share_ratio: float
) -> list[DecodeCandidate]:
    """Candidates that may take one more request; never empty, since one is always below the mean.

    >>> [c.key for c in within_share([DecodeCandidate("a", 4), DecodeCandidate("b", 1),
    ...     DecodeCandidate("c", 0)], 1.5)]
    ['b', 'c']
    """
    most = ceil(max_share_ratio * (1 + sum(c.num_requests for c in candidates)) / len(candidates))
    return [c for c in candidates if c.num_requests + 1 <= most]


# need a prompt's hashes and hotspot prevention
PREFIX_POLICIES = frozenset({"prefixAware", "kvAware", "latencyAware"})


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """rule: the policy's name, `pinned` or `session`."""

    key: str
    rule: str
    costs: dict[str, float] = field(default_factory=dict)


class DecodeChooser:
    """One per ingress; `draw` decides ties and samples for temperature > 0."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._last = ""

    def choose(
        self,
        policy: DecodeScoreSpec,
        request: RequestSize,
        candidates: Sequence[DecodeCandidate],
        pinned: str = "",
        session: str = "",
    ) -> DecodeChoice:
        """candidates: at least one.  pinned: the one of them that must run it; "" = any."""
        if pinned:
            return DecodeChoice(pinned, "pinned")
        if session and policy.session_affinity:
            if policy.hotspot_prevention:
                candidates = within_share(candidates, policy.max_share_ratio)
            return DecodeChoice(home_of(session, [c.key for c in candidates]), "session")
        return self._by_cost(policy, request, candidates)

    def _by_cost(
        self, policy: DecodeScoreSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
    ) -> DecodeChoice:
        attracts = policy.policy in PREFIX_POLICIES
        if attracts:
            candidates = with_enough_hits(candidates, request, policy.min_cache_hit_ratio)
        if attracts and policy.hotspot_prevention:
            # Workers over their share still count among those that have the prefix.
            cooled = {c.key: c for c in without_hot_prefix(candidates, policy.hot_workers_ratio)}
            candidates = [cooled[c.key] for c in within_share(candidates, policy.max_share_ratio)]
        costs = self._costs(policy, request, candidates)
        if taints := {c.key: c.taint for c in candidates if c.taint != 1.0}:
            costs = tainted(costs, taints)
        key = select(costs, policy.temperature, self._draw)
        if policy.policy == "roundRobin":
            self._last = key
        return DecodeChoice(key, policy.policy, costs)

    def _costs(
        self, policy: DecodeScoreSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
    ) -> dict[str, float]:
        match policy.policy:
            case "leastRequest":
                return least_request(candidates)
            case "roundRobin":
                return round_robin(candidates, self._last)
            case "prefixAware":
                return prefix_aware(candidates)
            case "kvAware":
                return kv_aware(policy.kv_aware, request, candidates)
            case "capacityAware":
                return capacity_aware(policy.capacity_aware, request, candidates)
            case "latencyAware":
                return latency_aware(policy.latency_aware, candidates)


def home_of(session: str, keys: Iterable[str]) -> str:
    """Session affinity by rendezvous hashing: each ingress computes the same worker."""

    def rank(key: str) -> tuple[bytes, str]:
        text = f"{len(session)}:{session}{key}"
        return blake2b(text.encode(), digest_size=8).digest(), key

    return max(keys, key=rank)


def select(costs: Mapping[str, float], temperature: float, draw: Random) -> str:
    """temperature > 0: softmax over -(cost - lowest) / (highest - lowest) / temperature."""
    lowest = min(costs.values())
    if temperature == 0:
        return draw.choice(sorted([key for key, cost in costs.items() if cost == lowest]))
    keys, highest = sorted(costs), max(costs.values())
    spread = (highest - lowest) or 1.0
    weights = [exp(-(costs[key] - lowest) / spread / temperature) for key in keys]
    return draw.choices(keys, weights)[0]


def tainted(costs: Mapping[str, float], taints: Mapping[str, float]) -> dict[str, float]:
    """Multiply costs by the workers' taints; an idle worker's cost of 0 grows by taint - 1.

    >>> tainted({"a": 4.0, "b": -4.0, "c": 0.0}, {"a": 2.0, "b": 2.0})
    {'a': 8.0, 'b': -2.0, 'c': 0.0}
    """
    found = dict(costs)
    for key, taint in taints.items():
        cost = costs[key]
        found[key] = max(cost * taint if cost > 0 else cost / taint, cost + taint - 1)
    return found
