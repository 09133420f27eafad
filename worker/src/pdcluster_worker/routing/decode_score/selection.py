"""Pick one worker by cost: the lowest, with ties drawn at random, or a softmax sample."""

from collections.abc import Mapping
from math import exp
from random import Random


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
