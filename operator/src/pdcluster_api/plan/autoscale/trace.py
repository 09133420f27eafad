"""Notes of one decision: what it read, which rule did what, and what stood in its way."""

from dataclasses import dataclass, field

from pdcluster_api.plan.observed.decision import DecisionInput, DecisionStep
from pdcluster_api.plan.observed.problem import Problem


@dataclass
class DecisionTrace:
    """Inputs, steps and problems, in the order in which they come about."""

    inputs: list[DecisionInput] = field(default_factory=list)
    steps: list[DecisionStep] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def step(self, rule: str, subject: str, sizes: tuple[int, int], why: str) -> None:
        """Note that a rule took a role or pool from one size to another, if it did."""
        before, after = sizes
        if before != after:
            self.steps.append(DecisionStep(rule, subject, before, after, why))
