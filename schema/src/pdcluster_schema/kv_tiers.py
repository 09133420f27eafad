"""The list `engine.kvTiers`: memory below the KV blocks of our own engine."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, rule
from pdcluster_schema.values import Text

HOST: Final = "host"
DISK: Final = "disk"

_PATH = "/[-A-Za-z0-9._/]+"
_NO_FOLDER = "is no absolute path of a folder"
_ABSOLUTE = "begin it with /, and use letters, digits, '-', '.', '_' and '/'"
_ORDER = "must be one host, one disk, or one host and then one disk"
_FIX = "leave the list or a tier out, or give host before disk"


def _check_path(path: str) -> str:
    if re.fullmatch(_PATH, path) is None:
        raise rule(f"{path!r} {_NO_FOLDER}", _ABSOLUTE)
    return path


Path = Annotated[
    Text,
    Field(max_length=253),
    AfterValidator(_check_path),
    Crd(Cel(f"self.matches('^{_PATH}$')", f"{_NO_FOLDER}: {_ABSOLUTE}")),
]


class KvTierSpec(SpecSection):
    """A tier: cached prefixes are copied to it behind the steps, and read back before their prompt
    is admitted, where that is measured to be faster than to compute them.
    """

    type: Literal["host", "disk"]
    """host = memory of the worker, pinned where it computes on an accelerator; disk = files of a
    local disk, which a worker that starts again finds.
    """
    size: Quantity
    """Memory or disk of one worker, such as 64Gi. Memory counts to resources of the role."""
    path: Path | None = None
    """Folder of a disk tier. In a pod it is an emptyDir of that size, unless a podTemplate mounts a
    volume there; it holds KV of prompts, so mount none that others read. For type disk, which needs
    it.
    """

    RULES = (
        Rule(
            cel="(self.type == 'disk') == has(self.path)",
            holds=lambda tier: (tier.type == DISK) == (tier.path is not None),
            reason="is for type: disk, which needs it",
            fix="give the folder of a local disk with that type, or leave it out",
            at="path",
        ),
    )


def _check_order(tiers: tuple[KvTierSpec, ...]) -> tuple[KvTierSpec, ...]:
    if [tier.type for tier in tiers] not in ([HOST], [DISK], [HOST, DISK]):
        raise rule(_ORDER, _FIX)
    return tiers


KvTiers = Annotated[
    tuple[KvTierSpec, ...],
    Many,
    Field(max_length=2),
    AfterValidator(_check_order),
    Crd(
        Cel(
            "size(self) == 1 || size(self) == 2 && self[0].type == 'host' && "
            "self[1].type == 'disk'",
            f"{_ORDER}: {_FIX}",
        )
    ),
]


def host_bytes(tiers: tuple[KvTierSpec, ...] | None) -> int:
    return sum(tier.size for tier in tiers or () if tier.type == HOST)


def disk_tier(tiers: tuple[KvTierSpec, ...] | None) -> KvTierSpec | None:
    return next((tier for tier in tiers or () if tier.type == DISK), None)
