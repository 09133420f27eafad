"""Fleets with two GPU types in each role, where one alone does not hold the load as cheaply."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from pdctl.sizing.objective import OfferedLoad
from pdctl.sizing.profile import EngineProfile
from pdctl.sizing.search import Placement, PlannedRole, SearchInput, placements

_PARTS = 16  # in which a load is divided

_Fleets = Mapping[object, Placement]


def joined_placements(
    profiles: Sequence[EngineProfile], given: SearchInput, *, with_splits: bool = True
) -> Iterator[Placement]:
    """Two fleets of one type each that share the load, with one setting of each role's engines.

    None without a demand: tokens for a GPU are then never more than those of the better type.
    """
    if given.demand is None or len(given.gpus) < 2:
        return
    fleets = {
        (gpu, part): _fleets(gpu, profiles, _share(given, gpu, given.demand, part), with_splits)
        for gpu in given.gpus
        for part in range(1, _PARTS)
    }
    for first, second in combinations(given.gpus, 2):
        for part in range(1, _PARTS):
            others = fleets[second, _PARTS - part]
            for settings, one in fleets[first, part].items():
                if settings in others:
                    yield _joined(one, others[settings], part / _PARTS)


def _share(given: SearchInput, gpu: str, demand: OfferedLoad, part: int) -> SearchInput:
    return replace(given, gpus={gpu: given.gpus[gpu]}, demand=demand.scaled(part / _PARTS))


def _fleets(
    gpu: str, profiles: Sequence[EngineProfile], given: SearchInput, with_splits: bool
) -> _Fleets:
    """The smallest within both objectives, by the settings of its engines."""
    own = [profile for profile in profiles if profile.gpu == gpu]
    return _smallest(
        one
        for one in placements(own, given, with_splits=with_splits)
        if one.itl_seconds <= given.objective.itl_seconds
    )


def _smallest(found: Iterable[Placement]) -> _Fleets:
    chosen: dict[object, Placement] = {}
    for one in found:
        settings = (one.kind, *map(_settings, one.roles))
        if settings not in chosen or one.gpus < chosen[settings].gpus:
            chosen[settings] = one
    return chosen


def _settings(role: PlannedRole) -> object:
    """Those that both types have, the streams too: routing gives each worker as many requests."""
    streams = 0 if role.role == "prefill" else role.batch
    return role.profile.layout, role.max_batched_tokens, streams


def _joined(one: Placement, other: Placement, share: float) -> Placement:
    """share: of the load that is on the first; latencies are those of the slower."""
    pairs = zip(one.roles, other.roles, strict=True)
    return replace(
        one,
        roles=tuple(role for pair in pairs for role in pair),
        requests_per_second=one.requests_per_second + other.requests_per_second,
        ttft_seconds=max(one.ttft_seconds, other.ttft_seconds),
        itl_seconds=max(one.itl_seconds, other.itl_seconds),
        mean_itl_seconds=share * one.mean_itl_seconds + (1.0 - share) * other.mean_itl_seconds,
        utilization=max(one.utilization, other.utilization),
        transfer_seconds=max(one.transfer_seconds, other.transfer_seconds),
    )
