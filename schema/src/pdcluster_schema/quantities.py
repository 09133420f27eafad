"""Kubernetes quantities: memory as bytes, resources and device claims, one spelling of a value."""

import math
import re
from collections import Counter
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, rule
from pdcluster_schema.values import Name, ObjectName, is_label

_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("k", "M", "G", "T", "P", "E")
_FACTORS = {
    "": Decimal(1),
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(_BINARY, 1)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(_DECIMAL, 1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate("mun", 1)},
}
# of memory: a milli-byte is refused
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
_AMOUNT = re.compile(rf"([0-9]+(?:\.[0-9]+)?)(m|{'|'.join((*_DECIMAL, *_BINARY))})?")
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([KMGTPE]i|[numkMGTPE]))?"
)

_MAX_QUANTITY = 64  # characters: Python refuses to write integers of thousands of digits


def parse_quantity(value: object) -> object:
    """Turn a quantity string into whole bytes (rounded up, as Kubernetes does); other types pass
    through to the type check.
    """
    if not isinstance(value, str):
        return value
    match = _MEMORY.fullmatch(value)
    if match is None:
        raise rule(
            f"{value!r} is not an amount of memory",
            "write bytes, or a number with Ki, Mi, Gi or Ti such as 512Mi",
        )
    return math.ceil(Decimal(match[1]) * _FACTORS[match[2] or ""])


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

_ANY_AMOUNT = "write a whole number, or a quantity in quotes such as 500m, 1.5 or 16Gi"


def _amount(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _AMOUNT.fullmatch(value):
        return value
    raise rule(f"{value!r} is not an amount", _ANY_AMOUNT)


Amount = Annotated[
    int | str,
    PlainValidator(_amount),
    Crd(
        Cel(
            "type(self) == int ? self >= 0 : "
            "self.matches('^[0-9]+([.][0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$')",
            f"not an amount: {_ANY_AMOUNT}",
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
    return Decimal(match[1]) * _FACTORS[match[2] or ""]


_SHARED = ("cpu", "memory", "ephemeral-storage")
_COUNTED = re.compile(r"hugepages-[0-9]+[KMGT]i|[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*")


class ResourcesSpec(SpecSection):
    """CPU, memory and the like of one worker, as in a container; accelerators are added from the
    pool's gpu.
    """

    requests: Annotated[dict[str, Amount], Crd(maxProperties=32)] = Field(default_factory=dict)
    """Amounts by name of the resource, such as cpu in cores and memory in bytes."""
    limits: Annotated[dict[str, Amount], Crd(maxProperties=32)] = Field(default_factory=dict)
    """Amounts by name of the resource, such as cpu in cores and memory in bytes."""

    RULES = (
        Cel(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in "
            "self.limits) || !isQuantity(string(self.requests[name])) || "
            "!isQuantity(string(self.limits[name])) || "
            "!quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "each request must be at most the limit of the same resource: lower the request or "
            "raise the limit",
            ".requests",
        ),
    )

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
        for name in (*self.limits, *self.requests):
            if name not in _SHARED:
                self._check_counted(name)
        return self

    def _check_counted(self, name: str) -> None:
        """Devices and huge pages, as the API server takes them in a pod."""
        if _COUNTED.fullmatch(name) is None:
            fix = "use cpu, memory, ephemeral-storage, hugepages-2Mi, or a device's name as rdma/ib"
            raise rule(f"{name!r} is no resource of a container", fix)
        limit = self.limits.get(name)
        amounts = {number_of(each.get(name, limit or 0)) for each in (self.limits, self.requests)}
        if limit is None or len(amounts) > 1 or any(each % 1 for each in amounts):
            raise rule(
                "must be a whole number, and the request equal to the limit",
                "give it in limits alone; the GPUs of a pool need no line",
                at=f"{'requests' if limit is None else 'limits'}.{name}",
            )
        if name.startswith("hugepages-") and not {"cpu", "memory"} & {*self.limits, *self.requests}:
            raise rule(f"{name} needs cpu or memory beside it", "give memory too", at="limits")


class ResourceClaimSpec(SpecSection):
    """Devices of a worker by dynamic resource allocation, as in a pod: a network card, or a channel
    of a ComputeDomain.
    """

    name: Name
    """Unique within the role; what computes lists it in its resources.claims."""
    resource_claim_name: ObjectName | None = None
    """ResourceClaim that all workers of the role share."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate of which each worker gets a claim of its own."""

    RULES = (
        is_label("self.name", ".name"),
        Rule(
            cel="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            holds=lambda claim: (
                (claim.resource_claim_name is None) != (claim.resource_claim_template_name is None)
            ),
            reason="needs one source",
            fix="give either resourceClaimName or resourceClaimTemplateName",
        ),
    )


MAX_CLAIMS = 16


def _unlike(claims: tuple[ResourceClaimSpec, ...]) -> tuple[ResourceClaimSpec, ...]:
    for name, count in Counter(claim.name for claim in claims).items():
        if count > 1:
            raise rule(f"{name!r} names two claims of this role", "give each its own name")
    return claims


ResourceClaims = Annotated[
    tuple[ResourceClaimSpec, ...],
    Many,
    Field(max_length=MAX_CLAIMS),
    Crd(list_type="map", list_map_keys=["name"]),
    AfterValidator(_unlike),
]


def canonical_quantity(value: Any) -> Any:
    """A Kubernetes quantity by its value; anything else as it is.

    >>> [canonical_quantity(each) for each in ("1000m", 0.5, "1.5Gi", "4096Mi", "2e3", "soon")]
    [1, '500m', '1536Mi', '4Gi', '2k', 'soon']
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    text = str(value)
    found = _QUANTITY.fullmatch(text) if len(text) <= _MAX_QUANTITY else None
    if found is None:
        return value
    written, exponent, suffix = found.groups()
    number = Decimal(f"{written}{exponent or ''}") * _FACTORS[suffix or ""]
    if number != number.to_integral_value():
        thousandths = number * 1000
        is_whole = thousandths == thousandths.to_integral_value()
        return f"{int(thousandths)}m" if is_whole else f"{number.normalize():f}"
    whole = int(number)
    for suffix in (*reversed(_BINARY), *reversed(_DECIMAL)):
        if whole and whole % int(_FACTORS[suffix]) == 0:
            return f"{whole // int(_FACTORS[suffix])}{suffix}"
    return whole
