"""The ratio band (prefill capacity over decode capacity), and the sizes nearest to the
recommendations.

Capacity is counted in H100s: a prefill worker weighs its dense FP8 rate (BF16
where there is no FP8 unit), a decode worker its memory bandwidth, each over that
of an H100; 1 where accelerators.yaml knows none.  Where the window shows how
fast the workers of every pool of prefill really are, those speeds say how its
pools compare; the unit stays the same, so that a band means the same before and
after the first request.  What a decode worker does in a second says how many
streams it has, not how fast it is, so that there only the table counts.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pdcluster_api.plan.autoscale.pools import Pool, Trail, Vector
from pdcluster_api.schema.accelerators import Accelerator, accelerators
from pdcluster_api.schema.autoscale import RatioSpec

_UNIT = "H100"
_DUST = 1e-9
_MOST_OFF = 2.0

Fits = Callable[[int, int], bool]
"""Whether two sizes are within the budget; true of smaller ones where it is true of greater ones.
"""


def table_weight(role: str, gpu: str) -> float:
    """Capacity of one accelerator of a type for a role, in H100s.

    >>> table_weight("prefill", "B200"), table_weight("decode", "H200")
    (2.2738757, 1.4328358)
    """
    known, unit = accelerators().get(gpu), accelerators()[_UNIT]
    if known is None:
        return 1.0
    rate, of_unit = _rate(role, known), _rate(role, unit)
    return 1.0 if rate is None or of_unit is None else round(rate / of_unit, 7)


def _rate(role: str, accelerator: Accelerator) -> int | None:
    return accelerator.fp8_flops or accelerator.bf16_flops if role == "prefill" else accelerator.bandwidth_bytes


def measured_weights(table: Sequence[float], speeds: Sequence[float | None], tolerance: float) -> list[float]:
    """Weights of a role's pools by measured tokens per second per busy worker.

    The first pool keeps the weight of the table.  A weight within the tolerance of the
    table's is left as it is, and so are all while one speed is unknown.  A speed more than
    `_MOST_OFF` times off the table's is taken as unknown: one odd pool must not move the band.

    >>> measured_weights([1.0, 2.0], [100.0, 300.0], 0.1)
    [1.0, 3.0]
    """
    if len(table) < 2 or any(not speed for speed in speeds):
        return list(table)
    unit = table[0] / (speeds[0] or 1.0)
    found = [max(old / _MOST_OFF, min(old * _MOST_OFF, (speed or 0.0) * unit)) for old, speed in zip(table, speeds, strict=True)]
    return [old if abs(new - old) <= tolerance * old else float(f"{new:.2g}") for old, new in zip(table, found, strict=True)]


def capacity(pools: Sequence[Pool], vector: Vector) -> float:
    """Capacity of a role, in H100s."""
    return sum(pool.weight * vector[pool.key] for pool in pools)


@dataclass(frozen=True)
class Band:
    """Least and greatest prefill capacity over decode capacity; 0 and infinity = no bound."""

    least: float = 0.0
    greatest: float = math.inf

    @classmethod
    def of(cls, spec: RatioSpec) -> "Band":
        """As the spec gives it."""
        return cls(spec.min or 0.0, math.inf if spec.max is None else spec.max)

    def distance(self, prefill: float, decode: float) -> float:
        """Distance of two capacities from the band, as the logarithm of a factor; 0 = inside, or no
        worker.
        """
        if prefill <= 0.0 and decode <= 0.0:
            return 0.0
        if prefill < decode * self.least * (1.0 - _DUST):
            return math.inf if prefill <= 0.0 else math.log(decode * self.least / prefill)
        if prefill > decode * self.greatest * (1.0 + _DUST):
            return math.inf if decode <= 0.0 else math.log(prefill / (decode * self.greatest))
        return 0.0

    def __str__(self) -> str:
        return f"{self.least:.3g} to {'any' if math.isinf(self.greatest) else f'{self.greatest:.3g}'}"


@dataclass(frozen=True)
class Sides:
    """Both roles as they could be: the sizes that are possible, and those that are recommended."""

    prefill: Trail
    decode: Trail
    recommendations: tuple[int, int]

    def has(self, sizes: tuple[int, int]) -> bool:
        """Return whether (prefill, decode) sizes are possible."""
        return all(side.first <= size <= side.last for side, size in zip((self.prefill, self.decode), sizes, strict=True))

    def vector(self, sizes: tuple[int, int]) -> Vector:
        """Replicas by pool at possible sizes."""
        return {**self.prefill.at(sizes[0]), **self.decode.at(sizes[1])}


def nearest(sides: Sides, band: Band, fits: Fits) -> tuple[int, int] | None:
    """(prefill, decode) sizes inside the band, or next to it; None = nothing fits.

    Of several, those that miss the least of the recommendations, then those that add the least.
    Missing counts by the greater part of a recommendation, so that a short budget is shared.
    """
    amount_of = cache(lambda prefill: capacity(sides.prefill.pools, sides.prefill.at(prefill)))

    def beside(decode: int) -> Place | None:
        """The best prefill size beside a decode size, and the rank of both: the less the better."""
        amount = capacity(sides.decode.pools, sides.decode.at(decode))
        wanted = _prefill_for(sides, amount_of, band, amount)
        prefill = largest(sides.prefill.first, wanted, lambda size: fits(size, decode))
        if prefill is None:
            return None
        return (band.distance(amount_of(prefill), amount), *_missed(sides.recommendations, (prefill, decode))), (prefill, decode)

    best = _least(beside, (sides.decode.first, sides.decode.last), sides.decode.clip(sides.recommendations[1]))
    return None if best is None else best[1]


Place = tuple[tuple[float, ...], tuple[int, int]]
"""How far two sizes are from what is asked for, and (prefill, decode) sizes."""


def _least(beside: Callable[[int], Place | None], ends: tuple[int, int], recommended: int) -> Place | None:
    """The best of the sizes between two ends.

    Up to `_LOOKS` of them are all looked at.  Of more, some at equal distances and the
    recommendation, and then all around the best of these: so many workers come so near to any
    band that one more or less does not matter.
    """
    low, high = ends
    stride = math.ceil((high - low + 1) / _LOOKS)
    found = [place for size in {*range(low, high + 1, stride), recommended} if (place := beside(size)) is not None]
    best = min(found, default=None)
    if best is None or stride == 1:
        return best
    size = best[1][1]
    return _least(beside, (max(low, size - stride), min(high, size + stride)), size)


def _prefill_for(sides: Sides, amount_of: Callable[[int], float], band: Band, decode: float) -> int:
    """The prefill size inside the band, or next to it, that is nearest to the recommendation."""
    first, sizes = sides.prefill.first, range(sides.prefill.first, sides.prefill.last + 1)
    low = first + bisect_left(sizes, decode * band.least * (1.0 - _DUST), key=amount_of)
    most = math.inf if math.isinf(band.greatest) else decode * band.greatest * (1.0 + _DUST)
    high = first + bisect_right(sizes, most, key=amount_of) - 1
    return sides.prefill.clip(max(low, min(sides.recommendations[0], high)))


def largest(first: int, size: int, fits: Callable[[int], bool]) -> int | None:
    """The largest fitting size from `first` to `size`, if all below one that fits do; None = none.

    >>> largest(1, 9, lambda size: size < 5), largest(1, 9, lambda size: False)
    (4, None)
    """
    sizes = range(first, size + 1)
    number = bisect_left(sizes, True, key=lambda each: not fits(each))
    return None if number == 0 else sizes[number - 1]


def _missed(recommendations: tuple[int, int], sizes: tuple[int, int]) -> tuple[float, ...]:
    lacks = [max(0, recommended - size) for recommended, size in zip(recommendations, sizes, strict=True)]
    share = max(lack / max(1, recommended) for lack, recommended in zip(lacks, recommendations, strict=True))
    return (
        share,
        float(sum(lacks)),
        float(sum(max(0, size - recommended) for recommended, size in zip(recommendations, sizes, strict=True))),
    )


def reach(recommended: int, other: float, factor: float, pools: Sequence[Pool]) -> int:
    """A size surely enough beside a capacity of the other role: the end of the search for the band."""
    lightest = min(pool.weight for pool in pools)
    return min(max(recommended, math.ceil(min(other * factor / lightest, 1e9))) + _ROUNDING_ROOM, recommended + _MOST_ADDED)


_MOST_ADDED = 256  # workers, twice those of a whole cell: a band that asks for more is met in several decisions
_LOOKS = 512  # sizes: twice what a band adds at most in one decision
_ROUNDING_ROOM = 8  # workers above what a band asks for: a narrow band may be met only by somewhat greater sizes


def ratio_said(pools: Mapping[str, Sequence[Pool]], vector: Vector) -> str:
    """`prefill 4 over decode 8 is 0.50`, in capacity."""
    prefill, decode = (capacity(pools[role], vector) for role in ("prefill", "decode"))
    return f"prefill {prefill:.3g} over decode {decode:.3g}" + (f" is {prefill / decode:.3g}" if decode else "")
