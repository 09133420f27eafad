"""Evaluate PromQL over a few series, for tests of alerts: as much of the language as the chart's
rules use.

A series has one number: the value of a gauge, or the increase per second of a counter.  So `rate`
gives it back, `increase` multiplies it by the window, and a window of a gauge holds it alone.
Matching, grouping, set operations and comparisons are as Prometheus has them.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import promql_parser

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
NOW = 1_000_000_000.0
"""Value of `time()`."""
Value = Vector | float

_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: (
        one / other
        if other
        else math.nan
        if not one or math.isnan(one)
        else math.copysign(math.inf, one)
    ),
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": fmean,
    "count": len,
}


@dataclass(frozen=True)
class Series:
    """One series and its number."""

    name: str
    labels: Mapping[str, str]
    number: float


def series(text: str, **labels: str) -> list[Series]:
    """Series from lines like `name{label="value"} 1.5`, each with these labels too."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        assert match is not None, line
        own = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        found.append(Series(match[1], {**own, **labels}, float(match[3])))
    return found


def evaluate(expression: str, data: Iterable[Series]) -> Vector:
    """The instant vector that an expression gives."""
    found = _value(promql_parser.parse(expression), list(data))
    assert isinstance(found, dict), expression
    return found


def _value(node: Any, data: list[Series]) -> Value:
    match type(node).__name__:
        case "NumberLiteral":
            return float(node.val)
        case "ParenExpr":
            return _value(node.expr, data)
        case "VectorSelector":
            return _selected(node, data)
        case "AggregateExpr":
            return _aggregated(node, data)
        case "Call":
            return _called(node, data)
        case "BinaryExpr":
            return _combined(node, data)
    raise NotImplementedError(f"no alert has used a {type(node).__name__} so far: evaluate it here")


def _selected(node: Any, data: list[Series]) -> Vector:
    def fits(labels: Mapping[str, str]) -> bool:
        return all(
            _fits(str(each.op), labels.get(each.name, ""), each.value)
            for each in node.matchers.matchers
        )

    return {
        frozenset(each.labels.items()): each.number
        for each in data
        if each.name == node.name and fits(each.labels)
    }


def _fits(op: str, found: str, wanted: str) -> bool:
    if op in ("MatchOp.Equal", "MatchOp.NotEqual"):
        return (found == wanted) is op.endswith(".Equal")
    return (re.fullmatch(wanted, found) is not None) is (op == "MatchOp.Re")


def _aggregated(node: Any, data: list[Series]) -> Vector:
    groups: dict[Labels, list[float]] = {}
    vector = _value(node.expr, data)
    assert isinstance(vector, dict)
    for labels, number in vector.items():
        groups.setdefault(_only(labels, node.modifier.labels), []).append(number)
    return {
        labels: _AGGREGATIONS[str(node.op).split()[0]](numbers)
        for labels, numbers in groups.items()
    }


def _called(node: Any, data: list[Series]) -> Value:
    name, arguments = node.func.name, list(node.args)
    if name == "time":
        return NOW
    if name in ("rate", "increase", "max_over_time"):
        (matrix,) = arguments
        factor = matrix.range.total_seconds() if name == "increase" else 1.0
        return {
            labels: factor * number
            for labels, number in _selected(matrix.vector_selector, data).items()
        }
    if name == "clamp_min":
        vector, least = (_value(each, data) for each in arguments)
        assert isinstance(vector, dict)
        assert isinstance(least, float)
        return {labels: max(least, number) for labels, number in vector.items()}
    assert name == "histogram_quantile", name
    share, buckets = (_value(each, data) for each in arguments)
    assert isinstance(share, float)
    assert isinstance(buckets, dict)
    histograms: dict[Labels, dict[float, float]] = {}
    for labels, number in buckets.items():
        named = dict(labels)
        histograms.setdefault(frozenset(labels - {("le", named["le"])}), {})[float(named["le"])] = (
            number
        )
    return {labels: _quantile(share, found) for labels, found in histograms.items()}


def _quantile(share: float, cumulative: dict[float, float]) -> float:
    """By linear interpolation in the bucket; the last finite bound for what is above it."""
    bounds = sorted(cumulative)
    rank = share * cumulative[math.inf]
    if not cumulative[math.inf]:
        return math.nan
    index = next(index for index, bound in enumerate(bounds) if cumulative[bound] >= rank)
    if bounds[index] == math.inf:
        return bounds[-2]
    low, before = (bounds[index - 1], cumulative[bounds[index - 1]]) if index else (0.0, 0.0)
    return low + (bounds[index] - low) * (rank - before) / (cumulative[bounds[index]] - before)


def _combined(node: Any, data: list[Series]) -> Value:
    op, left, right = str(node.op).split()[0], _value(node.lhs, data), _value(node.rhs, data)
    on = (
        node.modifier.matching.labels
        if node.modifier is not None and node.modifier.matching is not None
        else None
    )
    if op in ("and", "or", "unless"):
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        return _set_operation(op, left, right, on)
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[op](left, right)
    return (
        _filtered(_COMPARISONS[op], left, right, on)
        if op in _COMPARISONS
        else _calculated(_ARITHMETIC[op], left, right, on)
    )


def _set_operation(op: str, left: Vector, right: Vector, on: list[str] | None) -> Vector:
    if op == "or":
        known = {_only(labels, on) for labels in left}
        return {
            **left,
            **{
                labels: number for labels, number in right.items() if _only(labels, on) not in known
            },
        }
    known = {_only(labels, on) for labels in right}
    return {
        labels: number
        for labels, number in left.items()
        if (_only(labels, on) in known) is (op == "and")
    }


def _filtered(
    holds: Callable[[float, float], bool], left: Value, right: Value, on: list[str] | None
) -> Vector:
    return {labels: one for labels, one, other in _pairs(left, right, on) if holds(one, other)}


def _calculated(
    work: Callable[[float, float], float], left: Value, right: Value, on: list[str] | None
) -> Vector:
    return {labels: work(one, other) for labels, one, other in _pairs(left, right, on)}


def _pairs(left: Value, right: Value, on: list[str] | None) -> list[tuple[Labels, float, float]]:
    """One-to-one; the labels that both sides are matched by remain."""
    if isinstance(left, float):
        assert isinstance(right, dict)
        return [(labels, left, number) for labels, number in right.items()]
    if isinstance(right, float):
        return [(labels, number, right) for labels, number in left.items()]
    others = {_only(labels, on): number for labels, number in right.items()}
    matched = {_only(labels, on): number for labels, number in left.items()}
    assert (len(others), len(matched)) == (len(right), len(left)), "many-to-many matching"
    return [
        (labels, number, others[labels]) for labels, number in matched.items() if labels in others
    ]


def _only(labels: Labels, names: list[str] | None) -> Labels:
    return labels if names is None else frozenset(each for each in labels if each[0] in names)
