"""The list `engine.kvTiers`: memory below the KV blocks of our own engine."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, rule
from pdcluster_schema.values import ObjectName, Text

HOST: Final = "host"
DISK: Final = "disk"
SHARED: Final = "shared"

_PATH = "(/[.]*[-A-Za-z0-9_][-A-Za-z0-9._]*)+"
_NO_FOLDER = "is no absolute path of a folder"
_ABSOLUTE = "write it like /mnt/kv, with letters, digits, '-', '.' and '_', and neither .. nor //"
# Mounts of a worker's pod, its program and system, each with what is below; and folders that hold
# some of these, or files of other programs.
_NEEDED = "/(adapters|bin|etc/pdcluster|lib|lib64|models|opt/app|opt/venv|proc|sbin|sys|usr)(/.*)?"
_HOLDING = "/(dev|dev/shm|etc|opt|run|tmp|var)"
_OF_POD = "is a folder that a worker's pod has for itself"
_OWN = "give one of its own, like /mnt/kv"
_ORDERS: tuple[list[str], ...] = (
    [],
    [HOST],
    [DISK],
    [HOST, DISK],
    [HOST, SHARED],
    [HOST, DISK, SHARED],
)
_ORDER = "must be host, disk and shared in this order, each once at most, and shared after a host"
_FIX = "leave the list or a tier out, or change their order"
_SHARED_PATH = "must each have a folder of their own, since a disk tier is one worker's alone"
_PATH_FIX = "give disk and shared different paths"

_PORT = (
    "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"  # 65535
)
_URL = rf"rediss?://([-A-Za-z0-9.]+|\[[0-9A-Fa-f:]+\])(:({_PORT}))?(/[0-9]{{1,3}})?"
_NO_URL = "is no url of a Redis or Valkey server"
_URL_FIX = (
    "write redis://HOST:PORT, or rediss:// for TLS; a password is in the Secret of passwordSecret"
)


def _check_url(url: str) -> str:
    if re.fullmatch(_URL, url) is None:
        shown = re.sub(r"//[^/@]*@", "//...@", url)  # it may be a password
        raise rule(f"{shown!r} {_NO_URL}", _URL_FIX)
    return url


Url = Annotated[
    Text,
    Field(max_length=300),
    AfterValidator(_check_url),
    Crd(Cel("self.matches('^" + _URL.replace("\\", "\\\\") + "$')", f"{_NO_URL}: {_URL_FIX}")),
]


def _check_path(path: str) -> str:
    if re.fullmatch(_PATH, path) is None:
        raise rule(f"{path!r} {_NO_FOLDER}", _ABSOLUTE)
    if re.fullmatch(f"{_NEEDED}|{_HOLDING}", path) is not None:
        raise rule(f"{path!r} {_OF_POD}", _OWN)
    return path


Path = Annotated[
    Text,
    Field(max_length=253),
    AfterValidator(_check_path),
    Crd(
        Cel(f"self.matches('^{_PATH}$')", f"{_NO_FOLDER}: {_ABSOLUTE}"),
        Cel(f"!self.matches('^({_NEEDED}|{_HOLDING})$')", f"{_OF_POD}: {_OWN}"),
    ),
]


class KvTierSpec(SpecSection):
    """A tier: cached prefixes are copied to it behind the steps, and read back before their prompt
    is admitted, where that is measured to be faster than to compute them.
    """

    type: Literal["host", "disk", "shared"]
    """host = memory of the worker, pinned where it computes on an accelerator; disk = files of a
    local disk, which a worker that starts again finds; shared = a directory of a volume that
    workers mount, or a Redis or Valkey server, where each finds what the others have computed.
    """
    size: Quantity | None = None
    """Memory or disk of one worker, such as 64Gi; of a shared tier the limit of its directory, for
    all workers together. Memory counts to resources of the role. A server of a url has a limit of
    its own (maxmemory); all others need it.
    """
    path: Path | None = None
    """Folder of a disk tier, or of a shared one without a url. In a pod that of a disk tier is an
    emptyDir of that size, unless a podTemplate mounts a volume there; for a shared one a
    podTemplate has to. It holds KV of prompts, so mount none that others read or write.
    """
    url: Url | None = None
    """Redis or Valkey server of a shared tier, such as redis://valkey.cache:6379, without a user or
    password. It holds KV of prompts: let none but the workers reach it.
    """
    password_secret: ObjectName | None = None
    """A Secret of the PDCluster's namespace whose key `password` is that of the url's server. pdctl
    up has none.
    """

    RULES = (
        Rule(
            cel="(self.type == 'host') != (has(self.path) || has(self.url))",
            holds=lambda tier: (tier.type == HOST) == (tier.path is None and tier.url is None),
            reason="is for types disk and shared, which need it",
            fix="give the folder of a disk or a shared volume with those types, or leave it out",
            at="path",
        ),
        Rule(
            cel="!has(self.url) || (self.type == 'shared' && !has(self.path))",
            holds=lambda tier: tier.url is None or (tier.type == SHARED and tier.path is None),
            reason="is for type: shared without a path",
            fix="leave url or path out",
            at="url",
        ),
        Rule(
            cel="has(self.size) != has(self.url)",
            holds=lambda tier: (tier.size is None) == (tier.url is not None),
            reason="is the limit of a tier that the workers keep, and not of a url",
            fix="give it without a url; with one leave it out, and set maxmemory of the server",
            at="size",
        ),
        Rule(
            cel="!has(self.passwordSecret) || has(self.url)",
            holds=lambda tier: tier.password_secret is None or tier.url is not None,
            reason="is for a url",
            fix="give the url, or leave it out",
            at="passwordSecret",
        ),
    )


def _is_order(types: list[str]) -> str:
    """CEL for tiers of these types."""
    each = [f"self[{number}].type == '{name}'" for number, name in enumerate(types)]
    return f"({' && '.join([f'size(self) == {len(types)}', *each])})"


def _check_list(tiers: tuple[KvTierSpec, ...]) -> tuple[KvTierSpec, ...]:
    if [tier.type for tier in tiers] not in _ORDERS:
        raise rule(_ORDER, _FIX)
    paths = [tier.path for tier in tiers if tier.path is not None]
    if len(set(paths)) < len(paths):
        raise rule(_SHARED_PATH, _PATH_FIX)
    return tiers


KvTiers = Annotated[
    tuple[KvTierSpec, ...],
    Many,
    Field(max_length=3),
    AfterValidator(_check_list),
    Crd(
        Cel(
            " || ".join(map(_is_order, _ORDERS)),
            f"{_ORDER}: {_FIX}",
        ),
        Cel(
            "self.all(a, !has(a.path) || self.exists_one(b, has(b.path) && b.path == a.path))",
            f"{_SHARED_PATH}: {_PATH_FIX}",
        ),
    ),
]


def host_bytes(tiers: tuple[KvTierSpec, ...] | None) -> int:
    return sum(tier.size or 0 for tier in tiers or () if tier.type == HOST)


def disk_tier(tiers: tuple[KvTierSpec, ...] | None) -> KvTierSpec | None:
    return next((tier for tier in tiers or () if tier.type == DISK), None)


def password_secret(tiers: tuple[KvTierSpec, ...] | None) -> str | None:
    return next((tier.password_secret for tier in tiers or () if tier.password_secret), None)
