"""Marks of types that the API server alone reads: rules in CEL, and keywords of its schemas."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cel:
    """A rule that the API server checks.  path: of the field that a refusal names, below the
    section that has the rule.

    Blanks and line breaks of the rule count as one blank.
    """

    rule: str
    message: str
    path: str = ""

    def schema(self) -> dict[str, str]:
        """The rule as `x-kubernetes-validations` has it."""
        named = {"fieldPath": self.path} if self.path else {}
        return {"rule": " ".join(self.rule.split()), "message": self.message, **named}


class Crd:
    """Rules and keywords over those that follow from a type; None = no such keyword.

    `list_type` is `x-kubernetes-list-type`, and so are all with an underscore.
    """

    def __init__(self, *rules: Cel, **keywords: Any) -> None:
        self.rules = rules
        self.keywords = {_keyword(name): value for name, value in keywords.items()}


def _keyword(name: str) -> str:
    return f"x-kubernetes-{name.replace('_', '-')}" if "_" in name else name


def matches(pattern: str, what: str, fix: str) -> Crd:
    """The rule of text that must match the whole pattern."""
    return Crd(Cel(f"self.matches({quoted(f'^{pattern}$')})", f"not {what}: {fix}"))


def quoted(text: str) -> str:
    """A string of CEL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
