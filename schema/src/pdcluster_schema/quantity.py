"""Kubernetes quantities of memory: `512Mi`, `1.5G`, `1073741824`, as bytes.

Only the suffixes that make sense for memory are known; a milli-byte is refused.
"""

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

from pdcluster_schema.crd.keywords import Cel, Crd
from pdcluster_schema.rules import rule

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")


def parse_quantity(value: object) -> object:
    """Turn a quantity string into whole bytes (rounded up, as Kubernetes does); other types pass
    through to the type check.
    """
    if not isinstance(value, str):
        return value
    match = _PATTERN.fullmatch(value)
    if match is None:
        raise rule(
            f"{value!r} is not an amount of memory",
            "write bytes, or a number with Ki, Mi, Gi or Ti such as 512Mi",
        )
    return math.ceil(Decimal(match[1]) * _SUFFIXES[match[2] or ""])


_CEL = "^([0-9]*[1-9][0-9]*([.][0-9]+)?|[0-9]+[.][0-9]*[1-9][0-9]*)(k|M|G|T|Ki|Mi|Gi|Ti)?$"
Quantity = Annotated[
    int,
    BeforeValidator(parse_quantity),
    Field(ge=1),
    Crd(
        Cel(
            f"type(self) == int ? self > 0 : self.matches('{_CEL}')",
            "not an amount of memory: write bytes, or a number with Ki, Mi, Gi or Ti such as "
            "512Mi; more than 0",
        ),
        int_or_string=True,
        maxLength=32,
        type=None,
        format=None,
        minimum=None,
    ),
]
