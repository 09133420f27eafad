"""Base of every section of a PDCluster spec: frozen, camelCase in YAML, strict types, no
unknown field.
"""

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Many = Field(strict=False)  # a list in YAML, a tuple here


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
