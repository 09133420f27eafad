"""One spelling for values that Kubernetes takes in several: quantities, sets, empty maps.

Kustomize, Helm and editors write `1`, `"1"` and `1000m` as they like.  Two templates that are
equal after `canonical` make the same pods.  Lists whose order counts stay as they are, and
so do empty maps that say something, such as `emptyDir: {}` or a selector of everything.
"""

import json
import re
from decimal import Decimal
from typing import Any

_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("k", "M", "G", "T", "P", "E")
_FACTORS = {
    "": Decimal(1),
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(_BINARY, 1)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(_DECIMAL, 1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate("mun", 1)},
}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([KMGTPE]i|[numkMGTPE]))?"
)

_MAX_QUANTITY = 64  # characters: Python refuses to write integers of thousands of digits

_OF_QUANTITIES = frozenset({"requests", "limits"})
_QUANTITIES = frozenset({"sizeLimit", "divisor"})
_SETS = frozenset({"imagePullSecrets", "tolerations", "topologySpreadConstraints", "add", "drop"})
_NOTHING_IF_EMPTY = frozenset(
    {
        "metadata",
        "spec",
        "labels",
        "annotations",
        "nodeSelector",
        "securityContext",
        "capabilities",
        "resources",
        "requests",
        "limits",
        "affinity",
        "nodeAffinity",
        "podAffinity",
        "podAntiAffinity",
    }
)


def canonical(value: Any, field: str = "") -> Any:
    """A template, or a part of one, as all that mean the same are written.  field: its name

    >>> canonical({"limits": {"cpu": "1", "memory": "1024Mi"}, "requests": {}})
    {'limits': {'cpu': 1, 'memory': '1Gi'}}
    """
    if isinstance(value, dict):
        return _map(value, field)
    if isinstance(value, list | tuple):
        return _list(value, field)
    return canonical_quantity(value) if field in _QUANTITIES else value


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
    number, exponent, suffix = found.groups()
    return _canonical(Decimal(f"{number}{exponent or ''}") * _FACTORS[suffix or ""])


def _canonical(number: Decimal) -> int | str:
    if number != number.to_integral_value():
        thousandths = number * 1000
        is_whole = thousandths == thousandths.to_integral_value()
        return f"{int(thousandths)}m" if is_whole else f"{number.normalize():f}"
    whole = int(number)
    for suffixes in (_BINARY, _DECIMAL):
        for suffix in reversed(suffixes):
            if whole and whole % int(_FACTORS[suffix]) == 0:
                return f"{whole // int(_FACTORS[suffix])}{suffix}"
    return whole


def _map(value: dict[str, Any], field: str) -> dict[str, Any]:
    if field in _OF_QUANTITIES:
        return {name: canonical_quantity(amount) for name, amount in value.items()}
    items = {name: canonical(item, name) for name, item in value.items()}
    return {
        name: item for name, item in items.items() if not (name in _NOTHING_IF_EMPTY and item == {})
    }


def _list(value: list[Any] | tuple[Any, ...], field: str) -> list[Any]:
    items = [canonical(item) for item in value]
    return in_order(items) if field in _SETS else items


def in_order(values: Any) -> list[Any]:
    """The members of a set, each once."""
    members = {json.dumps(each, sort_keys=True): each for each in values}
    return [members[key] for key in sorted(members)]
