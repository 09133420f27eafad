"""CPU, memory and the like of a container: amounts by name, and what may be asked for of them."""

import re
from decimal import Decimal
from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from pdcluster_schema.crd.keywords import Cel, Crd
from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection

_FACTORS = {"": Decimal(1), "m": Decimal("0.001")} | {
    prefix + suffix: Decimal(base) ** power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kMGTPE" if base == 1000 else "KMGTPE", start=1)
}
_AMOUNT = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_FACTORS)})")


def _amount(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _AMOUNT.fullmatch(value):
        return value
    raise rule(
        f"{value!r} is not an amount",
        "write a whole number, or a quantity in quotes such as 500m, 1.5 or 16Gi",
    )


Amount = Annotated[
    int | str,
    PlainValidator(_amount),
    Crd(
        Cel(
            "type(self) == int ? self >= 0 : "
            "self.matches('^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$')",
            "not an amount: write a whole number, or a quantity in quotes such as 500m, 1.5 or "
            "16Gi",
        ),
        maxLength=32,
    ),
]
"""Amount of a resource, as in a container."""


def number_of(amount: int | str) -> Decimal:
    """The number that an amount stands for.

    >>> number_of("500m") < number_of(1), number_of("1.5Ki") == 1536, number_of("2M") == 2_000_000
    (True, True, True)
    """
    match = _AMOUNT.fullmatch(str(amount))
    assert match is not None, "an amount was checked before"
    return Decimal(match[1]) * _FACTORS[match[2]]


class ResourcesSpec(SpecSection):
    """CPU, memory and the like of one worker, as in a container; accelerators are added from the
    pool's gpu.
    """

    requests: Annotated[dict[str, Amount], Crd(maxProperties=32)] = Field(default_factory=dict)
    """Amounts by name of the resource, such as cpu in cores and memory in bytes."""
    limits: Annotated[dict[str, Amount], Crd(maxProperties=32)] = Field(default_factory=dict)
    """Amounts by name of the resource, such as cpu in cores and memory in bytes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, amount in self.requests.items():
            limit = self.limits.get(name)
            if limit is not None and number_of(amount) > number_of(limit):
                raise rule(
                    f"must be at most the limit of {name} ({limit}), not {amount}",
                    "lower the request or raise the limit",
                    at=f"requests.{name}",
                )
        return self
