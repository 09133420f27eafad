"""Base of every section of a PDCluster spec, and the rules and marks of its fields.

Frozen, camelCase in YAML, strict types, no unknown field.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from pdcluster_schema.quick_json import encoded

Many = Field(strict=False)  # a list in YAML, a tuple here


@dataclass(frozen=True)
class Cel:
    """A rule that the API server alone checks.  path: of the field that a refusal names, below the
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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of a section for the API server (`cel`) and for us (`holds`).

    reason, fix: follow the path `at`; a field in braces is named with its value where it is known.
    found:       the value that is wrong; None = that of the field `at`, beside others in braces.
    place:       where that is for us, below `at`, as in `[1]`; None = nowhere below it.
    values:      the section whose fields are in braces; None = the one that has the rule.
    """

    cel: str
    holds: Callable[[Any], bool]
    reason: str
    fix: str
    at: str = ""
    found: Callable[[Any], object] | None = None
    place: Callable[[Any], str] | None = None
    values: "Callable[[Any], SpecSection] | None" = None

    def schema(self) -> dict[str, str]:
        """The rule as `x-kubernetes-validations` has it."""
        reason = re.sub(r"\{(\w+)\}", r"\1", self.reason)
        message = f"{self.at} {reason}: {self.fix}".strip()
        return Cel(self.cel, message, f".{self.at}" if self.at else "").schema()

    def check(self, section: "SpecSection") -> None:
        if self.holds(section):
            return
        named = section if self.values is None else self.values(section)
        values = {to_camel(name): plain(value) for name, value in named}
        field = self.at.rpartition(".")[2]
        reason = re.sub(r"\{(\w+)\}", lambda found: f"{found[1]} ({values[found[1]]})", self.reason)
        if self.found is not None:
            reason += f", not {self.found(section)}"
        elif reason != self.reason and field in values:
            reason += f", not {values[field]}"
        place = "" if self.place is None else self.place(section)
        raise rule(reason, self.fix, at=f"{self.at}{place}")


def plain(value: Any) -> Any:
    """A number that is whole as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class SpecSection(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,  # for values that are made here; files are read by alias alone
    )

    RULES: ClassVar[tuple[Rule | Cel, ...]] = ()

    @model_validator(mode="after")
    def _follow_rules(self) -> Self:
        for each in self.RULES:
            if isinstance(each, Rule):
                each.check(self)
        return self


def ascending(low: str, high: str) -> Rule:
    """Both may be left out."""

    def holds(section: SpecSection) -> bool:
        least, greatest = values_of(section, low, high)
        return least is None or greatest is None or least <= greatest

    return Rule(
        cel=f"!has(self.{low}) || !has(self.{high}) || self.{low} <= self.{high}",
        holds=holds,
        reason=f"must be at most {{{high}}}",
        fix=f"lower {low} or raise {high}",
        at=low,
    )


def values_of(section: SpecSection, *names: str) -> list[Any]:
    """Values of fields by their names in YAML."""
    values = {to_camel(name): value for name, value in section}
    return [values[name] for name in names]


class Crd:
    """Rules and keywords over those that follow from a type; None = no such keyword.

    `list_type` is `x-kubernetes-list-type`, and so are all with an underscore.
    """

    def __init__(self, *rules: Cel, **keywords: Any) -> None:
        self.rules = rules
        self.keywords = {
            f"x-kubernetes-{name.replace('_', '-')}" if "_" in name else name: value
            for name, value in keywords.items()
        }


def quoted(text: str) -> str:
    """A string of CEL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def rule(reason: str, fix: str, *, at: str = "") -> PydanticCustomError:
    """An error to raise in a validator, which becomes a Fault.  at: path below the model that
    raises it, as in `replicas` or `pools[1].name`.
    """
    return PydanticCustomError("rule", "{reason}", {"reason": reason, "fix": fix, "at": at})


@dataclass(frozen=True)
class Spelled(AfterValidator):
    """A validator of text, and the same for the API server."""

    crd: Crd


def spelled(pattern: str, what: str, fix: str) -> Spelled:
    """A validator of text that must match the whole pattern, of Python's syntax and RE2's.

    what: completes `'...' is not ...`
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise rule(f"{value!r} is not {what}", fix)
        return value

    return Spelled(check, Crd(Cel(f"self.matches({quoted(f'^{pattern}$')})", f"not {what}: {fix}")))


def check_size(value: object, most: int, fix: str) -> None:
    """Refuse a part of an object that has more bytes than `most` as JSON."""
    num_bytes = json_size(value)
    if num_bytes > most:
        raise rule(too_long(num_bytes, most), fix)


def json_size(value: object) -> int:
    """Bytes as JSON; 0 of what JSON cannot say, which is refused where it stands."""
    try:
        return len(encoded(value))
    except ValueError:
        return 0


def too_long(num_bytes: int, most: int) -> str:
    """Reason of a refused size."""
    return f"has {num_bytes} bytes as JSON, and may have {most} at most"
