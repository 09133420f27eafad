"""Choice of a decode worker: pinned, then by session, then the lowest cost by the policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import exp
from random import Random

from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize
from pdcluster_worker.routing.decode_score.hotspot import (
    with_enough_hits,
    within_share,
    without_hot_prefix,
)
from pdcluster_worker.routing.decode_score.kv_aware import kv_aware
from pdcluster_worker.routing.decode_score.latency import capacity_aware, latency_aware
from pdcluster_worker.routing.decode_score.load import least_request, prefix_aware, round_robin

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
        """pinned: the worker that must run it; "" = any.

        Raises ValueError without candidates, and for a pinned worker that is not a candidate.
        """
        if pinned:
            if all(c.key != pinned for c in candidates):
                raise ValueError(f"worker {pinned} is no candidate")
            return DecodeChoice(pinned, "pinned")
        if not candidates:
            raise ValueError("no candidate to choose from: ask only with at least one worker")
        if session and policy.session_affinity:
            allowed = (
                within_share(candidates, policy.max_share_ratio)
                if policy.hotspot_prevention
                else candidates
            )
            return DecodeChoice(home_of(session, [c.key for c in allowed]), "session")
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
    """Session affinity by rendezvous hashing: each ingress computes the same worker.

    Raises ValueError without keys.
    """
    return max(keys, key=lambda key: (_rank(session, key), key))


def _rank(session: str, key: str) -> bytes:
    return blake2b(f"{len(session)}:{session}{key}".encode(), digest_size=8).digest()


def select(costs: Mapping[str, float], temperature: float, draw: Random) -> str:
    """temperature > 0: softmax over -(cost - lowest) / (highest - lowest) / temperature.

    Raises ValueError without costs.
    """
    if not costs:
        raise ValueError("no candidate to choose from: ask only with at least one worker")
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
    return {**costs, **{key: _tainted(costs[key], taint) for key, taint in taints.items()}}


def _tainted(cost: float, taint: float) -> float:
    return max(cost * taint if cost > 0 else cost / taint, cost + taint - 1)
