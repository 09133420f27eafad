"""Counter-based randomness: a number in (0, 1) from (seed, position) alone.

The same request draws the same number for the same position on every worker,
in every batch, after preemption and after a move (docs/architecture.md,
'Promises', 1).  Integer arithmetic only, so it is the same on
every machine.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of SplitMix64


def uniform(seed: int, position: int) -> float:
    """A uniform number in the open interval (0, 1), of 53 random bits.

    position: index of the token being drawn, prompt and output together.
    """
    bits = _mix(_mix(seed & _MASK) + position * _GOLDEN)
    return ((bits >> 11) + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's next output for this state (Steele, Lea, Flood 2014): every bit depends on every bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
