"""The ratio band: prefill capacity over decode capacity, in H100s. By a table of accelerators; of
prefill by measured speeds where all its pools have one. A decode worker's throughput says how many
streams it has, not how fast it is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdcluster_api.plan.autoscale.pools import Pool, Vector
from pdcluster_schema.accelerators import Accelerator, Precision, accelerators
from pdcluster_schema.autoscale import RatioSpec
from pdcluster_schema.engine_rules import precision_of
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec

_UNIT = "H100"
_DUST = 1e-9
_MOST_OFF = 2.0
_FAR = 1e6  # more than the logarithm of any factor

# Workers that a band adds to a role at most, twice those of a whole cell: a band that asks for more
# is met in several decisions
MOST_ADDED = 256

# Workers above what a band asks for: a narrow band may be met only by somewhat greater sizes
ROUNDING_MARGIN = 8


def table_weight(role: str, accelerator: Accelerator, precision: Precision = "bf16") -> float:
    """Capacity of one accelerator for a role, in H100s.

    precision: in which its engine computes prompts

    >>> known = accelerators()
    >>> table_weight("prefill", known["B200"]), table_weight("prefill", known["B200"], "fp4")
    (2.2750253, 9.1001011)
    >>> [table_weight("decode", known[gpu]) for gpu in ("H200", "B200", "B300")]
    [1.4328358, 2.25, 2.3880597]
    """
    unit = accelerators()[_UNIT]
    if role == "prefill":
        return _over(_flops(accelerator, precision), _flops(unit, precision))
    streams = _over(accelerator.bandwidth_bytes, unit.bandwidth_bytes)
    if accelerator.memory_bytes is None or accelerator.bandwidth_bytes is None:
        return streams
    return min(streams, _over(accelerator.memory_bytes, unit.memory_bytes))


def _flops(accelerator: Accelerator, precision: Precision) -> int | None:
    units = {"bf16": None, "fp8": accelerator.fp8_flops, "fp4": accelerator.fp4_flops}
    return units[precision] or accelerator.bf16_flops


def _over(number: int | None, of_unit: int | None) -> float:
    return 1.0 if number is None or of_unit is None else round(number / of_unit, 7)


def worker_weight(spec: PDClusterSpec, role: str, pool: PoolSpec) -> float:
    of_one = table_weight(role, spec.hardware(pool.gpu), precision_of(spec.engine_of(role)))
    return of_one * spec.gpus_per_replica(role, pool)


def measured_weights(
    table: Sequence[float], speeds: Sequence[float | None], tolerance: float
) -> list[float]:
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
    found = [
        max(old / _MOST_OFF, min(old * _MOST_OFF, (speed or 0.0) * unit))
        for old, speed in zip(table, speeds, strict=True)
    ]
    return [
        old if abs(new - old) <= tolerance * old else float(f"{new:.2g}")
        for old, new in zip(table, found, strict=True)
    ]


def capacity(role: str, pools: Iterable[Pool], vector: Vector) -> float:
    return sum(pool.weight * vector[pool.key] for pool in pools if pool.role == role)


@dataclass(frozen=True)
class Band:
    """Least and greatest prefill capacity over decode capacity; 0 and infinity = no bound."""

    least: float = 0.0
    greatest: float = math.inf

    @classmethod
    def of(cls, spec: RatioSpec) -> "Band":
        return cls(spec.min or 0.0, math.inf if spec.max is None else spec.max)

    def distance(self, prefill: float, decode: float) -> float:
        """Logarithm of the factor by which two capacities miss the band; 0 = inside."""
        if prefill <= 0.0 and decode <= 0.0:
            return 0.0
        if prefill < decode * self.least * (1.0 - _DUST):
            return math.inf if prefill <= 0.0 else math.log(decode * self.least / prefill)
        if prefill > decode * self.greatest * (1.0 + _DUST):
            # Without any decode worker each prefill worker is one too many.
            return _FAR + prefill if decode <= 0.0 else math.log(prefill / (decode * self.greatest))
        return 0.0

    def short(self, prefill: float, decode: float) -> str | None:
        """The role that has too few workers; None = neither."""
        if self.distance(prefill, decode) == 0.0:
            return None
        return "prefill" if prefill < decode * self.least else "decode"

    def reach(self, role: str, recommended: int, other: float, lightest: float) -> int:
        """The size up to which a role follows the other: surely enough for the band.  other:
        capacity of the other role; lightest: of one worker of this one
        """
        factor = self.least if role == "prefill" else 1.0 / self.greatest
        requested = math.ceil(min(other * factor / lightest, 1e9))
        return min(max(recommended, requested) + ROUNDING_MARGIN, recommended + MOST_ADDED)

    def __str__(self) -> str:
        greatest = "any" if math.isinf(self.greatest) else f"{self.greatest:.3g}"
        return f"{self.least:.3g} to {greatest}"


def ratio_text(pools: Sequence[Pool], vector: Vector) -> str:
    prefill, decode = (capacity(role, pools, vector) for role in ("prefill", "decode"))
    text = f"prefill {prefill:.3g} over decode {decode:.3g}"
    return text + (f" is {prefill / decode:.3g}" if decode else "")
