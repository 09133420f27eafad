"""Counter-based randomness: a number in (0, 1) from (seed, position) alone.

So a request draws the same on every worker and after preemption or migration (promise 1).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64


def uniform(seed: int, position: int) -> float:
    """53 random bits.  position: index of the token, prompt and output together."""
    bits = _mix(_mix(seed & _MASK) + position * _GOLDEN)
    return ((bits >> 11) + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's next output for this state (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """`uniform` of each pair."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        state = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
        bits = _mix_all(state + np.array(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
