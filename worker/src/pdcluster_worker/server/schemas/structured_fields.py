"""The fields by which a client constrains an answer: OpenAI's `response_format`, and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pdcluster_worker.messages.requests import MAX_CONSTRAINT_CHARACTERS
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
