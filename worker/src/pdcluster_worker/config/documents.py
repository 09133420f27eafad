"""YAML files to checked sections; errors name the file, the field's path and the reason."""

import re
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.engine_settings import Section

SectionT = TypeVar("SectionT", bound=Section)


def document_of(path: Path) -> Any:
    """An empty file is an empty mapping.  Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        return yaml.safe_load(content) or {}
    # not only YAMLError: ValueError of a date that is none, RecursionError, KeyError of a tagged
    # value
    except Exception as e:
        raise ConfigError(f"{path}: not YAML: {e}") from e


def converted(path: Path, document: Any, kind: type[SectionT]) -> SectionT:
    """Raises ConfigError."""
    check_numbers(path, document)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}{_fix(str(e), kind)}") from e


def check_numbers(path: Path, document: Any) -> None:
    """Refuse what is no number, for which no bound holds, and a document without an end.

    Raises ConfigError.
    """
    try:
        field = next(_not_numbers(document, "$"), None)
    except RecursionError as e:
        raise ConfigError(f"{path}: holds itself, by an anchor: write it out") from e
    if field is not None:
        raise ConfigError(f"{path}: Expected a number, got `.nan` - at `{field}`: write one")


def _not_numbers(value: Any, field: str) -> Iterator[str]:
    """Paths of NaN values, for which no bound holds."""
    match value:
        case dict():
            for key, each in value.items():
                yield from _not_numbers(each, f"{field}.{key}")
        case list():
            for number, each in enumerate(value):
                yield from _not_numbers(each, f"{field}[{number}]")
        case float() if isnan(value):
            yield field


def _fix(error: str, kind: type[Section]) -> str:
    """The fix of a number out of its range, or of a value that the field does not take."""
    if bound := re.match(r"Expected `(?:int|float)` ([<>])", error):
        return ": lower it" if bound[1] == "<" else ": raise it"
    if not error.startswith("Invalid enum value"):
        return ""
    steps = re.findall(r"\w+|\[\.\.\.\]", error.rpartition("`$")[2])
    values = [str(value) for value in _values(inspect.type_info(kind), steps)]
    return f": write one of {', '.join(values)}" if values else ""


def _values(node: inspect.Type, steps: Sequence[str]) -> Iterator[object]:
    """Literal values of the field at this path of a type."""
    match node:
        case inspect.UnionType():
            for each in node.types:
                yield from _values(each, steps)
        case inspect.LiteralType() if not steps:
            yield from node.values
        case inspect.StructType() if steps:
            for field in node.fields:
                if field.encode_name == steps[0]:
                    yield from _values(field.type, steps[1:])
        case inspect.DictType() if steps:
            yield from _values(node.value_type, steps[1:])
