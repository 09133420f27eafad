"""Fields by which a client constrains an answer, and the one constraint that they ask for."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import Field

from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.messages.requests import (
    CONSTRAINT_PARAM,
    MAX_CONSTRAINT_CHARACTERS,
    Constraint,
    ConstraintKind,
)
from pdcluster_worker.server.schemas.fields import Body, Text

MAX_CHOICES = 1000
MAX_NAME_CHARACTERS = 64

Choices = Annotated[
    list[Annotated[Text, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
]
Pattern = Annotated[Text, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARACTERS)]
Schema = dict[str, Any] | bool
WrittenSchema = Annotated[Schema | Pattern, Field(union_mode="left_to_right")]
"""vLLM's clients send a schema as an object, or as the JSON text of one."""


class JsonSchema(Body):
    """OpenAI's `json_schema`.

    strict: refuse a schema of which a part cannot be enforced; else such a part is left out.
    name, description: for the reader; the model is not shown them.
    """

    name: Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None
    description: Text | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`, and structural tags as vLLM takes them."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`, one field of it."""

    json_: Annotated[WrittenSchema | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Pattern | None = None


class Structured(Body):
    """Constraint fields of both APIs; at most one of them constrains an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: WrittenSchema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None


MAX_DEPTH = 64
"""Deepest nesting of objects and lists in a schema."""

Found = tuple[str, Constraint]
"""A field's path, and what it asks for."""


def constraint_of(request: Structured) -> Constraint | None:
    found = list(_found(request))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise field_error(second, f"{first} constrains the answer already: give one of the two")
    return found[0][1] if found else None


def constraint_param(request: Structured) -> str | None:
    """The path of the field that constrains the answer; None where none does."""
    return next((param for param, _ in _found(request)), None)


def with_field(error: RequestError, param: str | None) -> RequestError:
    """Turn an engine's error about a constraint into the fault of the field that has it."""
    if error.param != CONSTRAINT_PARAM or param is None:
        return error
    return RequestError(
        f"{param}: {error.message}", status=error.status, code=error.code, param=param
    )


def _found(request: Structured) -> Iterator[Found]:
    if request.response_format is not None:
        yield from _of_format(request.response_format)
    if request.structured_outputs is not None:
        yield from _of_outputs(request.structured_outputs)
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        yield from _of_field(name, name.removeprefix("guided_"), getattr(request, name))


def _of_outputs(requested: StructuredOutputs) -> Iterator[Found]:
    name = "structured_outputs"
    fields = {key: field.alias or key for key, field in StructuredOutputs.model_fields.items()}
    if not requested.model_fields_set:
        names = ", ".join(fields.values())
        raise field_error(name, f"names no constraint: give one of {names}")
    for key, field in fields.items():
        yield from _of_field(f"{name}.{field}", field, getattr(requested, key))


def _of_field(param: str, kind: str, value: Any) -> Iterator[Found]:
    """kind: json, regex, choice, grammar, json_object or structural_tag."""
    if value is None:
        return
    match kind:
        case "json":
            yield param, _of_schema(param, value)
        case "choice":
            yield param, _of_json(param, "choice", value)
        case "json_object" if value:
            yield param, Constraint("json_object")
        case "regex" | "grammar" | "structural_tag":
            yield param, Constraint(kind, value)


def _of_format(requested: ResponseFormat) -> Iterator[Found]:
    name = "response_format"
    match requested.type:
        case "json_object":
            yield name, Constraint("json_object")
        case "json_schema":
            param, schema = f"{name}.json_schema", requested.json_schema
            if schema is None:
                raise field_error(param, "is required with type json_schema")
            param = f"{param}.schema"
            yield param, _of_schema(param, schema.schema_, strict=bool(schema.strict))
        case "structural_tag":
            param = f"{name}.format"
            if requested.format is None:
                raise field_error(param, "is required with type structural_tag")
            tag = {"type": "structural_tag", "format": requested.format}
            yield param, _of_json(param, "structural_tag", tag)


def _of_schema(param: str, schema: Schema | str, *, strict: bool = False) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as e:
            raise field_error(param, f"is not JSON: {e}") from e
        except RecursionError as e:
            raise _too_deep(param) from e
        if not isinstance(schema, dict | bool):
            raise field_error(param, "must be a JSON schema, which is an object, true or false")
    return replace(_of_json(param, "json_schema", schema), strict=strict)


def _of_json(param: str, kind: ConstraintKind, value: Any) -> Constraint:
    # one text for one value: the order of properties counts, white space does not
    check_depth(param, value)
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        message = (
            f"{param}: has {len(text)} characters as JSON: at most {MAX_CONSTRAINT_CHARACTERS} are "
            "accepted"
        )
        raise RequestError(message, param=param)
    return Constraint(kind, text)


def check_depth(param: str, value: Any) -> None:
    """Raises RequestError for objects and lists that are nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise _too_deep(param)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep(param: str) -> RequestError:
    return field_error(
        param, f"objects and lists are nested more than {MAX_DEPTH} deep: make it flatter"
    )
