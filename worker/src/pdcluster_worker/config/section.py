"""Base of every section of the worker's two files, and the kinds of numbers that fields hold."""

from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Weight = Annotated[float, msgspec.Meta(ge=0.0)]
Share = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]


class Section(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True
):
    """Base of all sections: frozen, camelCase, no unknown field."""


class PolicySection(Section, frozen=True, forbid_unknown_fields=False):
    """Base of the policy's sections."""
