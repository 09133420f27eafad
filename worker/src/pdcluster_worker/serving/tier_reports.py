"""Tiers of KV of a worker's engines, as its peers and its record have them."""

from collections.abc import Iterable, Iterator

from pdcluster_schema.text import shortened
from pdcluster_worker.messages.engine import EngineStats
from pdcluster_worker.messages.peers import TierLoad
from pdcluster_worker.peers.records import StoppedTier
from pdcluster_worker.serving.disaggregation_stats import MAX_REASON


def stopped_tiers(reported: Iterable[EngineStats]) -> Iterator[StoppedTier]:
    """One for each tier that has stopped in any engine."""
    reasons = {tier.name: tier.reason for stats in reported for tier in stats.tiers if tier.reason}
    for name, reason in reasons.items():
        yield StoppedTier(name, shortened(reason, MAX_REASON))


def tier_loads(reported: list[EngineStats]) -> tuple[TierLoad, ...]:
    """Tiers of several engines of a worker, which have the same, together."""
    of_engines = zip(*(stats.tiers for stats in reported), strict=False)
    return tuple(
        TierLoad(
            tiers[0].name,
            sum(tier.stored for tier in tiers),
            sum(tier.num_slots for tier in tiers),
            "" if any(tier.reason for tier in tiers) else tiers[0].store,
        )
        for tiers in of_engines
    )
