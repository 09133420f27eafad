"""A decision of the autoscaler: replicas of every pool, with the numbers and steps that led to
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema.workload import PoolKey

_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class DecisionStep:
    """Change of one role or pool by one rule.

    rule:    its name, one word of `rules.RULES`
    subject: `prefill`, `decode`, `mixed` or `prefill/b200`
    before, after: replicas
    why:     as text, with the numbers that it compared
    """

    rule: str
    subject: str
    before: int
    after: int
    why: str


@dataclass(frozen=True)
class DecisionInput:
    """One number that a decision read.

    name: of the metric; value: with its unit in the name; limit: its threshold
    """

    subject: str
    name: str
    value: float | None
    limit: float | None = None


@dataclass(frozen=True)
class ScalingDecision:
    """The replicas of every pool, how they came about, what stood in the way, and when it was."""

    replicas: Mapping[PoolKey, int]
    inputs: tuple[DecisionInput, ...] = ()
    steps: tuple[DecisionStep, ...] = ()
    problems: tuple[Problem, ...] = ()
    at: datetime = _NEVER
