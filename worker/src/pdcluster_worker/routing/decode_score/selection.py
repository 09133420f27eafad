"""From costs to one worker: the lowest, ties by a seeded draw; or a draw that favours low costs.

The same costs and the same state of the generator give the same worker,
whatever order the candidates come in.
"""

from collections.abc import Mapping
from math import exp
from random import Random


def select(costs: Mapping[str, float], temperature: float, draw: Random) -> str:
    """The key of the lowest cost, or for temperature > 0 one by softmax.  ValueError without costs.

    The softmax is over -(cost - lowest) / (highest - lowest) / temperature: with equal costs all
    are as likely.
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
    """Costs times the taint of each worker, 1 where it has none; a cost below 0 grows as well.

    A product alone leaves a cost of 0, that of an idle worker, as it is: each cost grows by
    taint - 1 at least, as one of 1 would.

    >>> tainted({"a": 4.0, "b": -4.0, "c": 0.0}, {"a": 2.0, "b": 2.0})
    {'a': 8.0, 'b': -2.0, 'c': 0.0}
    >>> tainted({"a": 0.0, "b": 0.5, "c": -0.5}, dict.fromkeys("abc", 3.0))
    {'a': 2.0, 'b': 2.5, 'c': 1.5}
    """
    return {**costs, **{key: _tainted(costs[key], taint) for key, taint in taints.items()}}


def _tainted(cost: float, taint: float) -> float:
    return max(cost * taint if cost > 0 else cost / taint, cost + taint - 1)
