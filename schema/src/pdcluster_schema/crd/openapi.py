"""Types to structural schemas of the API server.

A description is the docstring below a field, else that of its section.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.section import Crd, plain

Schema = dict[str, Any]

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_LENGTHS = {"string": "Length", "array": "Items", "object": "Properties"}


class SchemaMaker:
    """Makes schemas of sections."""

    def __init__(self) -> None:
        self._made: dict[tuple[type, bool], Schema] = {}

    def section(self, kind: type, *, has_defaults: bool = True) -> Schema:
        """The schema of a section.

        has_defaults: the API server fills in what is left out; never of an engine, since a value
                      that it filled in on a role would count as given over spec.engine
        """
        has_defaults = has_defaults and kind is not EngineSpec
        key = kind, has_defaults
        if key not in self._made:
            fields = _typed_fields(kind) if is_typeddict(kind) else _model_fields(kind)
            self._made[key] = self._section(kind, list(fields), has_defaults)
        return self._made[key]

    def _section(self, kind: type, fields: list["_Field"], has_defaults: bool) -> Schema:
        schema: Schema = {"type": "object", "description": " ".join((kind.__doc__ or "").split())}
        if required := [field.name for field in fields if field.is_required]:
            schema["required"] = required
        if rules := getattr(kind, "RULES", ()):
            schema["x-kubernetes-validations"] = [each.schema() for each in rules]
        schema["properties"] = {
            field.name: self._field(field, has_defaults=has_defaults) for field in fields
        }
        return schema

    def _field(self, field: "_Field", *, has_defaults: bool) -> Schema:
        schema = self._type(field.annotation, field.metadata, has_defaults)
        if has_defaults and isinstance(field.default, str | int | float):
            schema["default"] = plain(field.default)
        if field.description:
            schema = {**schema, "description": field.description}
        return _marked(schema, field.metadata)

    def _type(self, annotation: Any, metadata: Iterable[Any], has_defaults: bool) -> Schema:
        if get_origin(annotation) is Annotated:
            inner, *marks = get_args(annotation)
            return _marked(self._type(inner, [*_flat(marks), *metadata], has_defaults), marks)
        if get_origin(annotation) in (Union, UnionType):
            return self._optional(annotation, metadata, has_defaults)
        if is_section(annotation):
            return self.section(annotation, has_defaults=has_defaults)
        schema = self._plain_type(annotation, has_defaults)
        return schema | _bounds(schema, metadata)

    def _optional(self, annotation: Any, metadata: Iterable[Any], has_defaults: bool) -> Schema:
        """A section that is left out is not null, in a list of sections neither.  A null in place
        of one of several values is dropped by the API server, which knows no such value.
        """
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        if len(kinds) > 1:
            return {"x-kubernetes-int-or-string": True}
        schema = self._type(kinds[0], metadata, has_defaults)
        is_dropped = _has_section(kinds[0]) or "enum" in schema
        return schema if is_dropped else {**schema, "nullable": True}

    def _plain_type(self, annotation: Any, has_defaults: bool) -> Schema:
        arguments = get_args(annotation)
        match get_origin(annotation):
            case origin if origin in (tuple, list):
                items = self._type(arguments[0], (), has_defaults)
                return {"type": "array", "items": items}
            case origin if origin is dict:
                if arguments[1] is Any:
                    return {"type": "object"}
                values = self._type(arguments[1], (), has_defaults)
                return {"type": "object", "additionalProperties": values}
            case origin if origin is Literal:
                schema = {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
            case _:
                schema = {"type": _TYPES[annotation]}
        return {**schema, "format": "int64"} if schema["type"] == "integer" else schema


class _Field:
    """A field of a section, of either kind of type."""

    def __init__(self, name: str, annotation: Any, metadata: Iterable[Any] = ()) -> None:
        self.name = name
        self.annotation = annotation
        self.metadata = list(_flat(metadata))
        self.is_required = False
        self.default: object = None
        self.description: str | None = None


def _model_fields(kind: type[BaseModel]) -> Iterator[_Field]:
    for name, info in kind.model_fields.items():
        field = _Field(str(info.alias), info.annotation, info.metadata)
        field.is_required, field.default = info.is_required(), info.default
        field.description = _descriptions(kind).get(name)
        yield field


def _typed_fields(kind: Any) -> Iterator[_Field]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        is_marked = get_origin(annotation) is Required
        field = _Field(name, get_args(annotation)[0] if is_marked else annotation)
        field.is_required = name in kind.__required_keys__
        field.description = _descriptions(kind).get(name)
        yield field


def is_section(annotation: Any) -> bool:
    """Return whether a type is one of named fields."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_model or is_typeddict(annotation)


def _has_section(annotation: Any) -> bool:
    return is_section(annotation) or any(_has_section(each) for each in get_args(annotation))


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from each.metadata
        elif isinstance(each, annotated_types.GroupedMetadata):
            yield from each
        else:
            yield each


def _bounds(schema: Schema, metadata: Iterable[Any]) -> Schema:
    unit = _LENGTHS.get(schema["type"])
    found: Schema = {}
    for each in metadata:
        match each:
            case annotated_types.Ge(value):
                found["minimum"] = plain(value)
            case annotated_types.Gt(value):
                found |= {"minimum": plain(value), "exclusiveMinimum": True}
            case annotated_types.Le(value):
                found["maximum"] = plain(value)
            case annotated_types.MinLen(value):
                found[f"min{unit}"] = value
            case annotated_types.MaxLen(value):
                found[f"max{unit}"] = value
    return found


def _marked(schema: Schema, marks: Iterable[Any]) -> Schema:
    for mark in _flat(marks):
        if isinstance(mark := getattr(mark, "crd", mark), Crd):
            merged = schema | mark.keywords
            schema = {name: value for name, value in merged.items() if value is not None}
            rules = [each.schema() for each in mark.rules]
            known = schema.get("x-kubernetes-validations", [])
            if rules and rules[0] not in known:
                schema["x-kubernetes-validations"] = [*known, *rules]
    return schema


@cache
def _descriptions(kind: type) -> dict[str, str]:
    """Docstrings below the fields of a class, each in one line."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            name, value = field.target, text.value
            assert isinstance(name, ast.Name)
            assert isinstance(value, ast.Constant)
            found[name.id] = " ".join(str(value.value).split())
    return found
