"""From pydantic's errors to faults that a user can act on: path, reason, fix."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pdcluster_schema.section import plain
from pdcluster_schema.text import shortened


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in an object.

    path:   where, as in `spec.roles.decode.pools[0].replicas`; empty for the document as a whole
    reason: what is wrong, with the value that was found
    fix:    what to write instead
    line:   of the file that it was read from, from 1; None = not known
    """

    path: str
    reason: str
    fix: str
    line: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.reason}; {self.fix}" if self.path else f"{self.reason}; {self.fix}"
        )


class InvalidObjectError(Exception):
    """A PDCluster object that is refused; `faults` names everything that is wrong, one line each in
    the message.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


Location = tuple[int | str, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)

UNKNOWN_FIELD = "extra_forbidden"
"""pydantic's type of that error."""

_SECTION = ("must be a section of fields", "write `field: value` lines below it")
_REMOVED = {
    "spec.monitoring": (
        "has moved to the operator's chart",
        "remove it, and set monitoring in the values of the chart",
    ),
    **{
        f"spec.routing.offload.{name}": (
            "was removed with the policies that it was for",
            "remove it, and set policy to rule or measured",
        )
        for name in ("islBounding", "prefillLoad")
    },
    **{
        f"spec.routing.offload.policy: {name}": (
            f"{name} was removed",
            "use rule or measured",
        )
        for name in ("islBounding", "prefillLoad", "islOrLoad")
    },
}
"""Fields (by path) and values (by path and value) of an earlier version: reason and fix."""

_EXPLANATIONS = {
    "int_type": ("must be a whole number", "write it without quotes or a fraction"),
    "float_type": ("must be a number", "write it without quotes"),
    "finite_number": ("must be a finite number", "write one"),
    "bool_type": ("must be true or false", "write true or false without quotes"),
    "string_type": ("must be text", "put it in quotes"),
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
    "tuple_type": ("must be a list", "write its entries as `- ...` lines"),
    "literal_error": ("must be {expected}", "change it to that"),
    "greater_than_equal": ("must be at least {ge}", "raise it"),
    "greater_than": ("must be more than {gt}", "raise it"),
    "less_than_equal": ("must be at most {le}", "lower it"),
    "string_too_short": ("must not be empty text", "write its name or path"),
    "string_too_long": ("must have at most {max_length} characters", "shorten it"),
    "too_short": ("must have at least {min_length} entries", "add some, or leave it out"),
    "too_long": ("must have at most {max_length} entries", "remove some"),
}


def validated(kind: type[ModelT], document: object) -> ModelT:
    """Read a document.  Raises InvalidObjectError with every fault."""
    try:
        return kind.model_validate(document, by_name=False)
    except ValidationError as e:
        raise InvalidObjectError(faults_of(e, kind)) from e


def validated_known(kind: type[ModelT], document: object) -> tuple[ModelT, list[str]]:
    """Read a document that may have fields of another version: what it says without them, and
    their paths.  Raises InvalidObjectError with every other fault.
    """
    unknown = unknown_fields(kind, document)
    if not unknown:
        return validated(kind, document), []
    try:
        value = kind.model_validate(document, by_name=False, extra="ignore")
    except ValidationError as e:
        raise InvalidObjectError(faults_of(e, kind)) from e
    return value, [".".join(map(str, location)) for location in unknown]


def unknown_fields(kind: type[BaseModel], document: object) -> list[Location]:
    """Locations of fields that are unknown here."""
    try:
        kind.model_validate(document, by_name=False)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        return [item["loc"] for item in errors if item["type"] == UNKNOWN_FIELD]
    return []


def faults_of(error: ValidationError, root: type[BaseModel]) -> list[Fault]:
    """Every fault of a failed validation of `root`."""
    errors = error.errors(include_url=False)
    wrong_within = {item["loc"][:-1] for item in errors}  # pydantic counts right entries alone
    return [
        _fault(item["type"], item["loc"], item["input"], item.get("ctx", {}), root)
        for item in errors
        if item["type"] != "too_short" or item["loc"] not in wrong_within
    ]


def known_fields(root: type[BaseModel], location: Location) -> list[str]:
    """Names (as in YAML) of the fields of the model at a location below `root`; empty where no
    model is.
    """
    annotation: Any = root
    for part in location:
        annotation = _step(annotation, part)
    models = list(_models(annotation))
    return [
        field.alias or name for model in models[:1] for name, field in model.model_fields.items()
    ]


def _fault(
    kind: str, location: Location, found: object, context: dict[str, Any], root: type[BaseModel]
) -> Fault:
    path = _path(location)
    if kind == "rule":
        at = context["at"]
        return Fault(f"{path}.{at}".strip(".") if at else path, context["reason"], context["fix"])
    if kind == UNKNOWN_FIELD and path in _REMOVED:
        return Fault(path, *_REMOVED[path])
    if kind == "literal_error" and isinstance(found, str) and f"{path}: {found}" in _REMOVED:
        return Fault(path, *_REMOVED[f"{path}: {found}"])
    if kind == UNKNOWN_FIELD:
        return Fault(
            path, "unknown field", _suggest(str(location[-1]), known_fields(root, location[:-1]))
        )
    if kind == "missing":
        return Fault(path, "is required", "add it")
    if found is None:
        return Fault(path, "is empty", "give it a value or remove the key")
    reason, fix = _explain(kind, context)
    if kind == "literal_error" and isinstance(found, bool):
        fix = "put it in quotes, since YAML takes a plain On or Off for true or false"
    return Fault(path, f"{reason}, not {_shown(found)}", fix)


def _shown(value: object) -> str:
    try:
        return shortened(repr(value), 60)
    except ValueError:  # Python writes out no whole number of more digits
        return "a number of thousands of digits"


def _explain(kind: str, context: dict[str, Any]) -> tuple[str, str]:
    """Reason and fix of one of pydantic's own error types; limits come from its context."""
    reason, fix = _EXPLANATIONS.get(
        kind, (f"is wrong ({kind.replace('_', ' ')})", "see crds/pdcluster.yaml")
    )
    return reason.format(**{name: plain(value) for name, value in context.items()}), fix


def _path(location: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(known)}"


def _step(annotation: Any, part: int | str) -> Any:
    """Type of one field or entry of a type; None when it has no such part."""
    for each in _members(annotation):
        if isinstance(part, int) and get_origin(each) is tuple:
            return get_args(each)[0]
        if get_origin(each) is dict:
            return get_args(each)[1]
    for model in _models(annotation):
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                return field.annotation
    return None


def _models(annotation: Any) -> Iterable[type[BaseModel]]:
    return (
        each
        for each in _members(annotation)
        if isinstance(each, type) and issubclass(each, BaseModel)
    )


def _members(annotation: Any) -> Iterator[Any]:
    """A type itself, or the members of a union, without what annotates them."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _members(each)
    else:
        yield annotation
