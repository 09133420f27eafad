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
    """Change of one role or pool by one rule."""

    rule: str  # its name, one word of `rules.RULES`
    subject: str  # `prefill`, `decode`, `mixed` or `prefill/b200`
    before: int  # replicas
    after: int
    why: str  # as text, with the numbers that it compared


@dataclass(frozen=True)
class DecisionInput:
    """One number that a decision read."""

    subject: str
    name: str  # of the metric
    value: float | None  # with its unit in the name
    limit: float | None = None  # its threshold


@dataclass(frozen=True)
class ScalingDecision:
    """The replicas of every pool, how they came about, what stood in the way, and when it was."""

    replicas: Mapping[PoolKey, int]
    inputs: tuple[DecisionInput, ...] = ()
    steps: tuple[DecisionStep, ...] = ()
    problems: tuple[Problem, ...] = ()
    at: datetime = _NEVER
